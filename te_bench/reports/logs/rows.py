"""Rows of named numbers, as Weights & Biases logs them, to values by step."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: What counts training steps, the best first; W&B's own _step counts calls of its log function.
STEP = (
    "step",
    "iter",
    "iteration",
    "global_step",
    "trainer/global_step",
    "train/global_step",
    "_step",
)


def series_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """{name: (step, value) in the rows' order} of every column of numbers.

    The step is the first of STEP that every row with that value has, or the row's number where none is.
    """
    found: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for n, row in enumerate(rows):
        for name, value in row.items():
            if name not in STEP and _number(value) is not None:
                found.setdefault(name, []).append((n, row))
    return {name: _points(name, logged) for name, logged in found.items()}


def _points(name: str, logged: Sequence[tuple[int, Mapping[str, Any]]]) -> list[tuple[float, float]]:
    axis = next((step for step in STEP if all(_number(row.get(step)) is not None for _, row in logged)), None)
    return [(float(n if axis is None else row[axis]), float(row[name])) for n, row in logged]


def _number(value: Any) -> float | None:
    """A number; W&B writes what is not finite as the words NaN, Infinity and -Infinity."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
