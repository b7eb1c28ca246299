"""Turn rows of named numbers, as Weights & Biases logs them, into values by step."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Names of the training step, best first. W&B's own _step counts calls of its log function.
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
    """Return {name: (step, value) in the rows' order} for every column of numbers.

    The step is the first of STEP that all rows with that column have; if there is none, it is the row's number.
    """
    found: dict[str, list[tuple[int, Mapping[str, float]]]] = {}
    for n, row in enumerate(rows):
        numbers = {name: number for name, value in row.items() if (number := _number(value)) is not None}
        for name in numbers:
            if name not in STEP:
                found.setdefault(name, []).append((n, numbers))
    return {name: _points(name, logged) for name, logged in found.items()}


def of_json(text: str | bytes) -> Any:
    """Return the text's JSON value. Raises ValueError for invalid JSON and for too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _points(name: str, logged: Sequence[tuple[int, Mapping[str, float]]]) -> list[tuple[float, float]]:
    axis = next((step for step in STEP if all(step in row for _, row in logged)), None)
    return [(float(n) if axis is None else row[axis], row[name]) for n, row in logged]


def _number(value: Any) -> float | None:
    """Return the value as a float, or None. W&B writes non-finite numbers as NaN, Infinity and -Infinity."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
