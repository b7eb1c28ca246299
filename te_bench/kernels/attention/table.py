"""What was measured of the backends, problem by problem and machine by machine, as JSON. Imports no torch.

One table ships beside this file; `te-bench tune attention` writes a user's own, whose cells take the place of the shipped
ones. Seconds are of one forward and one backward pass together.
"""

import functools
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from te_bench.kernels.attention import Problem

SCHEMA = 1
SHIPPED = Path(__file__).with_name("measured.json")
#: Doublings, as `distance` counts them, that a cell may be away from a problem that it speaks for: four times the length
#: are six, two of queries, two of keys and two of the keys that a row may see.
FARTHEST = 6.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Rivals at one problem on one machine; seconds of those that passed their check. source: where they come from."""

    machine: str  # as `machine` names it
    problem: Problem  # without capability; every size is given
    seconds: Mapping[str, float]
    source: str

    @property
    def key(self) -> tuple[str, Problem]:
        return self.machine, self.problem

    def fastest(self) -> list[str]:
        """The rivals, the fastest first."""
        return sorted(self.seconds, key=lambda name: (self.seconds[name], name))


def whole(p: Problem) -> Problem:
    """The problem with every size given, its mask told in one way (causal: no key after the row), and no GPU's traits."""
    left, right = (-1, -1) if p.window is None else p.window
    right = 0 if p.causal else right
    return replace(
        p,
        capability=None,
        causal=right == 0,
        window=None if left < 0 and right <= 0 else (left, right),
        kv_heads=p.heads if p.kv_heads is None else p.kv_heads,
        kv_length=p.length if p.kv_length is None else p.kv_length,
        v_head_dim=p.head_dim if p.v_head_dim is None else p.v_head_dim,
    )


def machine(device: str, gpu: str | None = None) -> str:
    """The name that cells are of: the GPU's, or the CPU's model."""
    if device != "cpu":
        return gpu or device
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"


def distance(a: Problem, b: Problem) -> float:
    """How many doublings apart two `whole` problems are: of queries, keys, heads in all, and the windows' widths.

    Infinite unless dtype, widths of the heads, query heads a key head, and kinds of mask and dropout are the same.
    """
    if _kind(a) != _kind(b) or not all(_sizes(a) + _sizes(b)):
        return math.inf
    return sum(abs(math.log2(x / y)) for x, y in zip(_sizes(a), _sizes(b), strict=True))


def _kind(p: Problem) -> tuple[Any, ...]:
    group = p.heads / max(p.kv_heads or 1, 1)
    windowed = None if p.window is None else tuple(side >= 0 for side in p.window)
    return p.device, p.dtype, p.causal, p.mask, p.packed, windowed, p.dropout > 0, p.head_dim, p.v_head_dim, group


def _sizes(p: Problem) -> tuple[int, ...]:
    keys = p.kv_length or 0
    width = keys
    if p.window is not None:
        left, right = (keys if side < 0 else side for side in p.window)
        width = min(left + right + 1, keys)
    return p.length, keys, p.batch * p.heads, width


def nearest(cells: Iterable[Cell], here: str, problem: Problem) -> tuple[Cell, float] | None:
    """The cell of machine `here` that is the fewest doublings away, the first of several, and how many; or None."""
    wanted = whole(problem)
    found = [(cell, distance(cell.problem, wanted)) for cell in cells if cell.machine == here]
    near = [pair for pair in found if pair[1] <= FARTHEST]
    return min(near, key=lambda pair: pair[1]) if near else None


# Files


def user_table() -> Path | None:
    """$XDG_CACHE_HOME/te-bench/attention.json, in ~/.cache where that is unset or no absolute path; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "te-bench" / "attention.json"
    except RuntimeError:
        return None


@functools.cache
def cells() -> tuple[Cell, ...]:
    """The user's cells, then the shipped ones that they leave; read once a process. Raises ValueError as `read` does."""
    own = user_table()
    return merged(read(SHIPPED), read(own) if own is not None and own.exists() else ())


def merged(old: Iterable[Cell], new: Iterable[Cell]) -> tuple[Cell, ...]:
    """new, and those of old that are of another problem or machine."""
    new = tuple(new)
    replaced = {cell.key for cell in new}
    return (*new, *(cell for cell in old if cell.key not in replaced))


def read(path: Path) -> tuple[Cell, ...]:
    """The cells of a file. Raises ValueError for one that is no table."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["schema"] != SCHEMA:
            raise ValueError(f"schema {table['schema']}; this te-bench reads schema {SCHEMA}")
        return tuple(_cell(cell) for cell in table["cells"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no table of measured attention ({error}): te-bench tune attention begins your own anew"
        ) from error


def text(cells: Iterable[Cell]) -> str:
    """The JSON that `read` reads, a cell after the other."""
    bodies = []
    for cell in cells:
        seconds = dict(sorted(cell.seconds.items(), key=lambda item: item[1]))
        problem = {name: value for name, value in asdict(cell.problem).items() if name != "capability"}
        bodies.append({"machine": cell.machine, "problem": problem, "seconds": seconds, "source": cell.source})
    return json.dumps({"schema": SCHEMA, "cells": bodies}, indent=1, allow_nan=False) + "\n"


def _cell(body: Mapping[str, Any]) -> Cell:
    problem = dict(body["problem"])
    window = problem.get("window")
    if window is not None:
        left, right = window
        problem["window"] = int(left), int(right)
    seconds = {str(name): float(value) for name, value in body["seconds"].items()}
    if not seconds or not all(0 < value < math.inf for value in seconds.values()):
        raise ValueError(f"seconds {body['seconds']} must be numbers greater than 0")
    found = whole(Problem(**problem, capability=None))
    if not all(size > 0 for size in (found.batch, found.heads, found.head_dim, *_sizes(found))):
        raise ValueError(f"sizes must be at least 1: {problem}")
    return Cell(machine=str(body["machine"]), problem=found, seconds=seconds, source=str(body["source"]))
