"""Read console output: losses by regular expressions, line by line."""

import re
from collections.abc import Callable, Mapping, Sequence

from te_bench.reports.logs import TORN, LogFile, Series, decimals

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|(?i:nan|inf))"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def lines_of(file: LogFile) -> list[str]:
    """Return the lines without colours. Text that a progress bar overwrote (\\r) is on lines of its own."""
    return _COLOURS.sub("", file.text).splitlines(keepends=True)


def read_lines(
    files: Sequence[LogFile],
    patterns: Mapping[str, re.Pattern[str]],
    completed: Callable[[str], str] = lambda line: line,
) -> Series:
    """Return the losses that each name's pattern, with groups `step` and `loss`, finds in the `completed` lines.

    A last line without its end may be torn: its loss is left out where it has fewer decimals than every one before it.
    """
    losses: dict[str, list[tuple[float, float]]] = {name: [] for name in patterns}
    notes: list[str] = []
    for file in files:
        fewest: dict[str, int] = {}
        for line in map(completed, lines_of(file)):
            for name, pattern in patterns.items():
                if not (hit := pattern.search(line)):
                    continue
                if (digits := decimals(hit["loss"])) is not None:  # nan is whole
                    if not line.endswith(("\n", "\r")) and digits < fewest.get(name, 0):
                        notes.append(TORN.format(file.path))
                        continue
                    fewest[name] = min(digits, fewest.get(name, digits))
                losses[name].append((float(hit["step"]), float(hit["loss"])))
    return Series(losses={name: found for name, found in losses.items() if found}, notes=tuple(notes))
