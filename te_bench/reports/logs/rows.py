"""Rows of named numbers, as Weights & Biases logs them, to losses by step."""

from collections.abc import Iterable, Mapping
from typing import Any

from te_bench.reports.logs.names import is_loss

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


def series_of(rows: Iterable[Mapping[str, Any]], chosen: str | None = None) -> dict[str, list[tuple[float, float]]]:
    """{name: (step, loss) in the rows' order} of every column whose name has "loss" in it.

    The step is the first of STEP that every row with that loss has, or the row's number where none is.
    """
    kept = list(rows)
    names = dict.fromkeys(
        name for row in kept for name, value in row.items() if is_loss(name) and _number(value) is not None
    )
    found = {}
    for name in names:
        logged = [(n, row) for n, row in enumerate(kept) if _number(row.get(name)) is not None]
        axis = next((step for step in STEP if all(_number(row.get(step)) is not None for _, row in logged)), None)
        found[name] = [(float(n if axis is None else row[axis]), float(row[name])) for n, row in logged]
    return found


def _number(value: Any) -> float | None:
    """A number; W&B writes what is not finite as the words NaN, Infinity and -Infinity."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
