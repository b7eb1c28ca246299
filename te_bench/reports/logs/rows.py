"""Turn rows of named numbers, as Weights & Biases logs them, into values by step."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from te_bench.reports.logs import Series
from te_bench.reports.logs.names import is_loss

#: What counts training steps, the best first; W&B's own _step counts calls of its log function.
STEP = (
    "step",
    "steps",
    "iter",
    "iters",
    "iteration",
    "iterations",
    "global_step",
    "trainer/global_step",
    "train/global_step",
    "train_step",
    "training_step",
    "_step",
    "epoch",
)
RANK = ("rank", "local_rank", "global_rank")

_Row = Mapping[str, float]


def series_of(rows: Iterable[Mapping[str, Any]], place: object, blank: str = "null") -> Series:
    """Every column of numbers, its points in the rows' order.

    The step is the first of STEP that every row with that value has, else that most of them have, which are left out
    without it, or the row's number where no row has a step. A step that starts again with each epoch goes on over the
    epochs. Rows of named ranks are put side by side. `blank`: what stands for a value that is none. Raises ValueError, with
    `place`, for losses whose steps start again without an epoch.
    """
    numbers: list[_Row] = []
    empty: dict[str, list[int]] = {}
    known: dict[str, list[int]] = {}
    for row, values in _side_by_side([(row, _numbers(row)) for row in rows]):
        for name, value in row.items():
            if value is None:
                empty.setdefault(name, []).append(len(numbers))
        for name in values:
            if name not in STEP:
                known.setdefault(name, []).append(len(numbers))
        numbers.append(values)
    axes = {name: axis for name in STEP if (axis := _axis(name, numbers)) is not None}
    losses, blanks, notes = {}, {}, []
    for name, at in known.items():
        had = [step for step in axes if all(step in numbers[n] for n in at)]
        counts = {step: sum(step in numbers[n] for n in at) for step in axes if axes[step]}
        if not had and is_loss(name) and any(counts.values()):
            step = max(counts, key=counts.__getitem__)
            without = f"without {step}, {len(at) - counts[step]} of {len(at)}"
            if 2 * counts[step] > len(at):
                notes.append(f"{place}: {name} is left out of the rows {without}")
                had, at = [step], [n for n in at if step in numbers[n]]
            else:
                notes.append(f"{place}: the steps of {name} are the numbers of its rows, because of rows {without}")
        axis = next((axes[step] for step in had if axes[step]), None if had else {})
        if axis is None and is_loss(name):
            raise ValueError(
                f"{place}: its {had[0]} falls back to where it began, as if it counted within epochs: count it through, add "
                "a column epoch, or take out what was trained before"
            )
        if axis is None:
            continue
        losses[name] = [(axis.get(n, float(n)), numbers[n][name]) for n in at]
        missing = [n for n in empty.get(name, ()) if n > at[-1]]
        usual = max((after - before for before, after in pairwise(at)), default=1)  # some values are not of every row
        if is_loss(name) and missing and missing[-1] - at[-1] >= usual:
            first, last = (axis.get(n, float(n)) for n in (missing[0], missing[-1]))
            told = f"steps {first:g} to {last:g} have" if first != last else f"step {first:g} has"
            blanks[name] = f"{told} {blank} for {name}"
    return Series(losses=losses, blank=blanks, notes=tuple(notes))


def of_json(text: str | bytes) -> Any:
    """Return the text's JSON value. Raises ValueError for invalid JSON and for too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _side_by_side(rows: list[tuple[Mapping[str, Any], _Row]]) -> list[tuple[Mapping[str, Any], _Row]]:
    """The rows by their steps, where each names its rank: some logs have one rank after the other."""
    step = next((name for name in STEP if all(name in values for _, values in rows)), None)
    ranks = [{values.get(name) for _, values in rows} for name in RANK]
    if step is None or not any(len(told) > 1 and None not in told for told in ranks):
        return rows
    return sorted(rows, key=lambda one: (one[1].get("epoch", 0.0), one[1][step]))


def _axis(name: str, rows: Sequence[_Row]) -> dict[int, float] | None:
    """{row: step}, the steps counted over the epochs; {} where they start again and no epoch tells; None of no such name."""
    at = [n for n, row in enumerate(rows) if name in row]
    steps = [rows[n][name] for n in at]
    if not at:
        return None
    rises = [after - before for before, after in pairwise(steps)]
    same = len(at) > 1 and not any(rises)
    if not same and min(rises, default=0) >= 0:
        return dict(zip(at, steps, strict=True))
    length = max(steps) - min(steps) + min((rise for rise in rises if rise > 0), default=1)
    found, passed, first = {at[0]: steps[0]}, 0, {rows[at[0]].get("epoch"): 0}
    for (before, n), step, rise in zip(pairwise(at), steps[1:], rises, strict=True):
        epochs = [None if name == "epoch" else rows[k].get("epoch") for k in (before, n)]
        if None not in epochs and epochs[0] != epochs[1] and (rise < 0 or same):
            # An epoch that is known is gone through again, by a resumed run; so is a part of one that is passed.
            later = all(known is None or rows[n]["epoch"] > known for known in first)
            passed = first.get(epochs[1], passed + later)
        elif rise < 0 and step <= steps[0]:
            return {}
        first.setdefault(epochs[1], passed)
        found[n] = step + passed * length
    return found


def _numbers(row: Mapping[str, Any]) -> _Row:
    found = {name: number for name, value in row.items() if (number := _number(value)) is not None}
    written = {name: row[name] for name in STEP if isinstance(row.get(name), str) and row[name].strip().isdecimal()}
    return found | {name: float(digits) for name, digits in written.items()}


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
