"""Measured times of every operator's backends, by machine and problem: one table, as JSON. Imports no torch.

measured.json beside this file has the shipped rows; `te-bench tune` writes a user's own, which replace shipped ones.
`te_bench.kernels.OPERATOR.table` defines a row's problem, and the distance between problems.
"""

import contextlib
import functools
import importlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 2
#: {operator: its name in `te-bench tune`}.
OPERATORS = {"attention": "attention", "gemm": "gemm", "linear_cross_entropy": "head"}
SHIPPED = Path(__file__).with_name("measured.json")

_choices: list[Callable[[], None]] = []  # called by `forget`


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """A row: the times of the backends that passed their check, for one problem on one machine."""

    operator: str  # one of OPERATORS
    machine: str  # by `machine_name`
    problem: Any  # read by the operator's table: frozen, with all sizes set
    seconds: Mapping[str, float]
    source: str  # origin of the seconds

    @property
    def key(self) -> tuple[str, str, Any]:
        return self.operator, self.machine, self.problem

    def fastest(self) -> list[str]:
        """Return the backends, the fastest first."""
        return sorted(self.seconds, key=lambda name: (self.seconds[name], name))

    def choose(self, usual: str, others: Collection[str], least_gain: float) -> str:
        """Return the fastest of `usual` and `others`; `usual` unless it takes at least least_gain times as long."""
        found = next((name for name in self.fastest() if name == usual or name in others), usual)
        usual_seconds = self.seconds.get(usual, 0.0)  # an unmeasured usual backend stays
        return found if usual_seconds >= least_gain * self.seconds.get(found, math.inf) else usual


def machine_name(device: str, gpu: str | None = None) -> str:
    """Return the machine name of rows: the GPU's name, or the CPU's model."""
    if device != "cpu":
        return gpu or device
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"


def nearest(operator: str, machine: str, distance: Callable[[Any], float]) -> tuple[Timing, float] | None:
    """Return the machine's row with the least finite distance(row's problem), and that distance; or None."""
    rows = [row for row in timings(operator) if row.machine == machine]
    found = [(row, far) for row in rows if (far := distance(row.problem)) < math.inf]
    return min(found, key=lambda pair: pair[1], default=None)


# Files


def user_table() -> Path | None:
    """Return $XDG_CACHE_HOME/te-bench/measured.json, by default in ~/.cache; None without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "te-bench" / "measured.json"
    except RuntimeError:
        return None


def exists(file: Path | None) -> bool:
    """Return whether the file exists; False if its folder cannot be searched (another user's home in a container)."""
    try:
        return file is not None and file.exists()
    except OSError:
        return False


@functools.cache
def timings(operator: str) -> tuple[Timing, ...]:
    """Return the operator's rows: the user's, then the shipped ones that they do not replace; read once a process.

    Raises ValueError for an unreadable file or row of the user's, with the command that measures it anew.
    """
    return merged(read(SHIPPED, operator), _own(operator))


def forget() -> None:
    """Read the files and choose again when next needed; compiled code keeps its choices."""
    timings.cache_clear()
    for clear in _choices:
        clear()


def on_forget(clear: Callable[[], None]) -> None:
    """Make `forget` call this, too: for caches of choices made from the rows."""
    _choices.append(clear)


def users_choices(operators: Iterable[str], machine: str) -> list[str]:
    """Return the user's rows of these operators on this machine as text, without their source; [] without any.

    The order does not depend on the file's. Unreadable rows are left out: code that chooses by them reports the error.
    """
    found: list[str] = []
    for operator in operators:
        with contextlib.suppress(ValueError):
            found += [_said(row) for row in _own(operator) if row.machine == machine]
    return found


def _own(operator: str) -> list[Timing]:
    """Return the user's rows, sorted, so that ties between equally near rows do not depend on the file's order."""
    path = user_table()
    if path is None or not exists(path):
        return []
    try:
        return sorted(read(path, operator), key=_said)
    except ValueError as error:
        raise ValueError(f"{error}. To measure it anew: te-bench tune {OPERATORS[operator]}") from error


def merged(old: Iterable[Timing], new: Iterable[Timing]) -> tuple[Timing, ...]:
    """Return `new`, and the rows of `old` for another operator, problem or machine."""
    new = tuple(new)
    replaced = {row.key for row in new}
    return (*new, *(row for row in old if row.key not in replaced))


def read(path: Path, operator: str | None = None) -> tuple[Timing, ...]:
    """Return a file's rows, of one operator or all. Raises ValueError for an invalid table or row."""
    rows, bad = read_good(path, operator)
    if bad:
        raise ValueError(bad[0])
    return rows


def read_good(path: Path, operator: str | None = None) -> tuple[tuple[Timing, ...], list[str]]:
    """Return a file's readable rows, and the errors of the others. Raises ValueError for an invalid table."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["schema"] != SCHEMA:
            raise ValueError(f"schema {table['schema']}; this te-bench reads schema {SCHEMA}")
        bodies = list(table["rows"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no table of measured times ({error})") from error
    rows, bad = [], []
    for number, body in enumerate(bodies, 1):
        try:
            if operator in (None, body["operator"]):
                row = _timing(body)
                hash(row.key)  # a list in a name's place has none
                rows.append(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            bad.append(f"{path}: row {number} is no measured time ({error})")
    return tuple(rows), bad


def text(rows: Iterable[Timing]) -> str:
    """Return the JSON that `read` reads, one row per line."""
    return f'{{"schema": {SCHEMA}, "rows": [\n' + ",\n".join(map(_line, rows)) + "\n]}\n"


def _line(row: Timing) -> str:
    return json.dumps({**_body(row), "source": row.source}, allow_nan=False)


def _said(row: Timing) -> str:
    """Return everything that a choice may depend on."""
    return json.dumps(_body(row), allow_nan=False)


def _body(row: Timing) -> dict[str, Any]:
    problem = {name: value for name, value in asdict(row.problem).items() if name != "capability"}
    seconds = {name: row.seconds[name] for name in row.fastest()}
    return {"operator": row.operator, "machine": row.machine, "problem": problem, "seconds": seconds}


def _timing(body: Mapping[str, Any]) -> Timing:
    operator, problem = str(body["operator"]), body["problem"]
    seconds = {str(name): float(value) for name, value in body["seconds"].items()}
    if not seconds or not all(0 < value < math.inf for value in seconds.values()):
        raise ValueError(f"seconds {body['seconds']} must be numbers greater than 0")
    if operator not in OPERATORS:
        raise ValueError(f"operator {operator!r}: {', '.join(OPERATORS)}")
    problem = importlib.import_module(f"te_bench.kernels.{operator}.table").read_problem(problem)
    machine, source = str(body["machine"]), str(body["source"])
    return Timing(operator=operator, machine=machine, problem=problem, seconds=seconds, source=source)
