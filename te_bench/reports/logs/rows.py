"""Rows of named numbers, as Weights & Biases logs them, to values by step."""

import json
import math
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
    found: dict[str, list[tuple[int, Mapping[str, float]]]] = {}
    for n, row in enumerate(rows):
        numbers = {name: number for name, value in row.items() if (number := _number(value)) is not None}
        for name in numbers:
            if name not in STEP:
                found.setdefault(name, []).append((n, numbers))
    return {name: _points(name, logged) for name, logged in found.items()}


def of_json(text: str | bytes) -> Any:
    """What the text says. Raises ValueError for what is no JSON, and for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _points(name: str, logged: Sequence[tuple[int, Mapping[str, float]]]) -> list[tuple[float, float]]:
    axis = next((step for step in STEP if all(step in row for _, row in logged)), None)
    return [(float(n) if axis is None else row[axis], row[name]) for n, row in logged]


def _number(value: Any) -> float | None:
    """A number; W&B writes what is not finite as the words NaN, Infinity and -Infinity."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
