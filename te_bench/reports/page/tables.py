"""List the report's tables by name, and write tables as Markdown and for a terminal."""

import re
import textwrap
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from te_bench.reports.analysis.rows import printable
from te_bench.reports.group_result import GroupResult, load_report
from te_bench.reports.page import (
    alone_tables,
    equal_loss,
    layer_tables,
    scaled_tables,
    screen,
    step_tables,
    text,
    training_tables,
    trial_tables,
    verdict_tables,
)
from te_bench.reports.page.headlines import headlines
from te_bench.reports.page.table import Table

LEAST_NAME, LEAST_WORD = 40, 20  # characters of a name's line: before columns are left out for it, and at least
#: UNSHOWN: columns that a terminal does not show. GIVING_WAY: columns that it omits, in this order, to make room for names.
UNSHOWN = ("TFLOP/s", "MFU")
GIVING_WAY = (
    "Peak reserved, GiB",
    "tokens/s",
    "Peak, GiB",
    "ok/planned",
    "Collectives, ms",
    "Compute, ms",
    "Predicted, ms",
    "GPUs",
    "J/step",
    "mJ/token",
)


def _each(what: str, make: Callable[[Any], Table | None]) -> Callable[[GroupResult], Sequence[Table | None]]:
    """Return a function that makes a table of each item in a field of the result."""
    return lambda result: [make(one) for one in getattr(result, what)]


#: {name for `embed` and the page: the function that makes the table}.
TABLES: dict[str, Callable[[GroupResult], Sequence[Table | None] | Table | None]] = {
    "ladder": step_tables.ladder,
    "memory": step_tables.memory,
    "scaling": scaled_tables.times,
    "scaling_memory": scaled_tables.memory,
    "floor": step_tables.floors,
    "floor_kinds": step_tables.floor_kinds,
    "floor_kernels": step_tables.floor_kernels,
    "layer": _each("layers", layer_tables.times),
    "layer_kinds": _each("layers", layer_tables.kinds),
    "layer_kernels": _each("layers", layer_tables.kernels),
    "curves": _each("trainings", training_tables.curves),
    "verdict": _each("studies", verdict_tables.gaps),
    "verdict_brief": _each("studies", verdict_tables.brief),
    "losses": _each("studies", verdict_tables.losses),
    "verdict_reasons": _each("studies", verdict_tables.reasons),
    "between": _each("studies", verdict_tables.between),
    "equal_loss": _each("studies", equal_loss.times),
    "stability": _each("studies", training_tables.stability),
    "stress": _each("stress", training_tables.stress),
    "max_batch": step_tables.largest_batch,
    "attention_choice": alone_tables.choices,
    "attention": alone_tables.times,
    "attention_ratios": alone_tables.ratios,
    "heads": alone_tables.heads,
    "pieces": alone_tables.pieces,
    "gemms": alone_tables.gemms,
    "benchmarks": trial_tables.benchmarks,
    "numerics": alone_tables.scaling_errors,
    "errors": trial_tables.errors,
    "failures": trial_tables.failures,
    "kernels": trial_tables.kernels,
    "specifications": trial_tables.specifications,
}


def tables_of(result: GroupResult, name: str) -> list[Table]:
    """Return the tables of one name for one group; [] if the group measured nothing of the kind."""
    found = TABLES[name](result)
    return [table for table in (found if isinstance(found, Sequence) else [found]) if table is not None]


def markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown; text of records is escaped."""
    lines = ["| " + " | ".join(escape(column.title) for column in table.columns) + " |"]
    lines.append("|" + "|".join("---:" if column.numeric else "---" for column in table.columns) + "|")
    lines += ["| " + " | ".join(escape(value.text) for value in row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def escape(content: str) -> str:
    """Return text that Markdown shows unchanged: no markup, no HTML, no end of a table cell."""
    for special, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        content = content.replace(special, entity)
    for special in "\\|`*[]~$":
        content = content.replace(special, "\\" + special)
    if re.search(r"(?<!\w)_.*_(?!\w)", content, re.DOTALL):  # one begins a word and a later one ends a word
        content = re.sub(r"(?<!\w)_+|_+(?!\w)", lambda found: found[0].replace("_", "\\_"), content)
    return content


def summary(directories: Sequence[Path]) -> str:
    """Return the ladder in plain text for a terminal of 100 columns. Raises ValueError as load_results does."""
    report = load_report(directories)
    results = report.results
    lines = [f"{results.outcomes.get('ok', 0)} of {len(results.rows)} trials ok{report.unjudged}"]
    for sentence in headlines(report):
        lines += textwrap.wrap(sentence, screen.WIDTH)
    for result in report.groups:
        group = result.group
        for table in [table for name in ("ladder", "scaling", "layer") for table in tables_of(result, name)]:
            what = group.title if table.name in ("ladder", "scaling") else table.caption
            shown = f"{what} ({group.where})"
            title = text.shortened(printable(shown), screen.WIDTH)
            lines += ["", title, *terminal(table)]
    return "\n".join(lines) + "\n"


def terminal(table: Table, across: int = screen.WIDTH) -> list[str]:
    """Return the table's rows, each of one line or more.

    Where it is too wide, GIVING_WAY's columns go, and remarks in brackets go below. Then the widest column gives way first:
    its cells continue below, because their ends may be all that distinguishes them.
    """
    kept = [i for i, column in enumerate(table.columns) if column.title not in UNSHOWN]
    cells = [[column.title, *(row[i].text for row in table.rows)] for i, column in enumerate(table.columns)]
    widths = [max(map(len, column)) for column in cells]
    for i in [i for title in GIVING_WAY for i in kept if table.columns[i].title == title]:
        if _room(widths, kept, across) < min(widths[0], LEAST_NAME):
            kept.remove(i)
    below = []
    if sum(widths[i] + 2 for i in kept) - 2 > across:
        below = [line for i in kept if table.columns[i].numeric for line in _without_remarks(cells[0], cells[i])]
    columns = _folded([cells[i] for i in kept], across)
    widths = [max(len(line) for cell in column for line in cell) for column in columns]
    rows = []
    for row in zip(*columns, strict=True):
        lines = []
        for name, *values in zip_longest(*row, fillvalue=""):
            shown = [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *shown]).rstrip())
        rows.append("\n".join(lines))
    return [*rows, *(part for line in below for part in _lines(line, across, "  "))]


def _room(widths: Sequence[int], kept: Sequence[int], across: int) -> int:
    """Return the number of characters of a line that the other columns leave for names."""
    return across - sum(widths[i] + 2 for i in kept[1:])


def _without_remarks(names: Sequence[str], cells: list[str]) -> list[str]:
    """Take the remarks at the ends of a column's cells away, and return them in lines with the names of their rows."""
    remarks: dict[str, list[str]] = {}
    for place, cell in enumerate(cells[1:], start=1):
        if found := re.fullmatch(r"(.*\S) \(([^()]+)\)", cell):
            cells[place] = found[1]
            remarks.setdefault(found[2], []).append(names[place])
    return [f"{cells[0]}, {'; '.join(rows)}: {remark}" for remark, rows in remarks.items()]


def _folded(columns: Sequence[Sequence[str]], across: int) -> list[list[list[str]]]:
    """Return the lines of each cell of each column, so that the columns fit side by side if words can be kept whole."""
    widths = [max(map(len, column)) for column in columns]
    least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    least[0] = min(least[0] + 2, LEAST_WORD)  # a name may be one long word
    while sum(widths) + 2 * (len(widths) - 1) > across and (over := [i for i, w in enumerate(widths) if w > least[i]]):
        widths[max(over, key=widths.__getitem__)] -= 1
    values = [[_lines(cell, width) for cell in column] for column, width in zip(columns[1:], widths[1:], strict=True)]
    taken = sum(2 + max(len(line) for cell in column for line in cell) for column in values)
    return [[_lines(name, max(widths[0], across - taken), "  ") for name in columns[0]], *values]


def _lines(cell: str, width: int, indent: str = "") -> list[str]:
    """Wrap a cell; an interval stays on one line where that has room."""
    whole = re.sub(r"\[[^]]*\]", lambda interval: interval[0].replace(" ", "\0"), cell)
    kept = whole if max(map(len, whole.split()), default=0) <= width else cell
    lines = textwrap.wrap(kept, width, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines] or [""]
