"""Measured times of every operator's backends, by machine and problem: one table, as JSON. Imports no torch.

The rows that ship stand in measured.json beside this file; `te-bench tune` writes a user's own, which take the place of
shipped ones. What a row's problem is, and how near two problems are, is in `te_bench.kernels.OPERATOR.table`.
"""

import functools
import importlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 2
ATTENTION_SCHEMA = 1  # of tables that held attention alone, whose rows were called cells
OPERATORS = ("attention", "gemm", "linear_cross_entropy")
SHIPPED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """A row: seconds of the backends that passed their check, for one problem on one machine."""

    operator: str  # one of OPERATORS
    machine: str  # as `machine_name` has it
    problem: Any  # as the operator's table reads it: frozen, with every size given
    seconds: Mapping[str, float]
    source: str  # where the seconds come from

    @property
    def key(self) -> tuple[str, str, Any]:
        return self.operator, self.machine, self.problem

    def fastest(self) -> list[str]:
        """The backends, the fastest first."""
        return sorted(self.seconds, key=lambda name: (self.seconds[name], name))

    def choose(self, usual: str, others: Collection[str], least_gain: float) -> str:
        """The fastest of the usual backend and others; the usual one unless it takes least_gain times as long or more."""
        found = next((name for name in self.fastest() if name == usual or name in others), usual)
        usual_seconds = self.seconds.get(usual, 0.0)  # unmeasured, it stays
        return found if usual_seconds >= least_gain * self.seconds.get(found, math.inf) else usual


def machine_name(device: str, gpu: str | None = None) -> str:
    """The name that rows are of: the GPU's, or the CPU's model."""
    if device != "cpu":
        return gpu or device
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"


def nearest(operator: str, machine: str, distance: Callable[[Any], float]) -> tuple[Timing, float] | None:
    """The machine's row at the least finite distance(row's problem), the first of several, and its distance; or None."""
    rows = [row for row in timings() if (row.operator, row.machine) == (operator, machine)]
    found = [(row, far) for row in rows if (far := distance(row.problem)) < math.inf]
    return min(found, key=lambda pair: pair[1], default=None)


# Files


def user_table() -> Path | None:
    """$XDG_CACHE_HOME/te-bench/measured.json, in ~/.cache where that is unset or no absolute path; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "te-bench" / "measured.json"
    except RuntimeError:
        return None


def user_tables() -> list[Path]:
    """The user's files that exist, the one that counts more first: below the table one of attention alone."""
    path = user_table()
    return [] if path is None else [file for file in (path, path.with_name("attention.json")) if _exists(file)]


def _exists(file: Path) -> bool:
    """False too where the folder may not be searched: another user's home, as in containers."""
    try:
        return file.exists()
    except OSError:
        return False


@functools.cache
def timings() -> tuple[Timing, ...]:
    """The user's rows, then the shipped ones that they leave; read once a process. Raises ValueError as `read` does."""
    rows = read(SHIPPED)
    for path in reversed(user_tables()):
        rows = merged(rows, read(path))
    return rows


def forget() -> None:
    """Read the files again when they are next needed."""
    timings.cache_clear()


def merged(old: Iterable[Timing], new: Iterable[Timing]) -> tuple[Timing, ...]:
    """new, and those of old that are of another operator, problem or machine."""
    new = tuple(new)
    replaced = {row.key for row in new}
    return (*new, *(row for row in old if row.key not in replaced))


def read(path: Path) -> tuple[Timing, ...]:
    """The rows of a file. Raises ValueError for one that is no table."""
    try:
        return tuple(_timing(row) for row in _bodies(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        known = "measured attention" if path.stem == "attention" else "measured times"
        raise ValueError(
            f"{path} is no table of {known} ({error}): te-bench tune attention begins your own anew"
        ) from error


def text(rows: Iterable[Timing]) -> str:
    """The JSON that `read` reads, a line a row."""
    return f'{{"schema": {SCHEMA}, "rows": [\n' + ",\n".join(map(_line, rows)) + "\n]}\n"


def users_text(operators: Collection[str], machine: str) -> str | None:
    """The user's rows of these operators on this machine, as `text` has them; None without any, or if unreadable."""
    if not operators:
        return None
    try:
        rows = [row for path in user_tables() for row in read(path)]
    except ValueError:  # whoever chooses by them says what is wrong
        return None
    rows = [row for row in rows if row.operator in operators and row.machine == machine]
    return text(rows) if rows else None


def _line(row: Timing) -> str:
    problem = {name: value for name, value in asdict(row.problem).items() if name != "capability"}
    seconds = {name: row.seconds[name] for name in row.fastest()}
    body = {"operator": row.operator, "machine": row.machine, "problem": problem, "seconds": seconds}
    return json.dumps({**body, "source": row.source}, allow_nan=False)


def _bodies(table: Any) -> Iterator[Mapping[str, Any]]:
    if table["schema"] == ATTENTION_SCHEMA:
        return ({"operator": "attention", **cell} for cell in table["cells"])
    if table["schema"] != SCHEMA:
        raise ValueError(f"schema {table['schema']}; this te-bench reads schema {SCHEMA}")
    return iter(table["rows"])


def _timing(body: Mapping[str, Any]) -> Timing:
    operator = body["operator"]
    if operator not in OPERATORS:
        raise ValueError(f"operator {operator!r}; known are {', '.join(OPERATORS)}")
    seconds = {str(name): float(value) for name, value in body["seconds"].items()}
    if not seconds or not all(0 < value < math.inf for value in seconds.values()):
        raise ValueError(f"seconds {body['seconds']} must be numbers greater than 0")
    problem = importlib.import_module(f"te_bench.kernels.{operator}.table").read_problem(body["problem"])
    machine, source = str(body["machine"]), str(body["source"])
    return Timing(operator=operator, machine=machine, problem=problem, seconds=seconds, source=source)
