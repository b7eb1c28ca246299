"""Fit the batch to the memory: micro-batches, checkpointed blocks, or a larger batch if there is room. No torch.

All are measured, because no formula tells their cost for a model that te-bench does not know.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from te_bench.advice.candidates import Choice
from te_bench.advice.convergence import preference
from te_bench.advice.steps import CLOSE, peak, typical
from te_bench.experiments.spec import Record

if TYPE_CHECKING:
    from te_bench.advice.advise import Run

SMALLER, MORE, AGAIN = "smaller micro-batches", "a larger batch", "checkpointed blocks"
LARGER = (2, 4, 8)  # times the sequences
FILLED = 0.9  # of the available memory, which a step's forecast may take


def smaller(run: "Run") -> None:
    """If no step fits, find how many sequences fit at a time, without and with checkpointed blocks.

    Each search starts from the step with the least memory, else from the user's.
    """
    q = run.question
    held = {choice: peak(records) or math.inf for choice, records in run.steps.items()}
    cut = _cut(run, _least(held, held) or q.have, q.shares, SMALLER)
    again = q.checkpointed(_least(held, filter(q.checkpointed, held)) or q.have)
    if again is not None:
        shares = [share for share in q.shares if cut is None or share < cut.accumulate]
        _cut(run, again, [1, *shares], AGAIN, fitting=cut)


def _least(held: Mapping[Choice, float], of: Iterable[Choice]) -> Choice | None:
    return min(of, key=lambda choice: held[choice], default=None)


def _cut(run: "Run", base: Choice, shares: Sequence[int], words: str, fitting: Choice | None = None) -> Choice | None:
    """Return the choice with the fewest micro-batches that fit, or None.

    Two measured peaks forecast the others; sizes that would not fit are skipped, except the last if nothing else fits.
    fitting: a step that fits, whose repetitions keep their share of the budget.
    """
    q = run.question
    found = {1.0: held} if (held := peak(run.steps.get(base, ()))) is not None else {}
    for share in shares:
        choice = replace(base, accumulate=share)
        forced = share == shares[-1] and fitting is None
        if not forced and len(found) > 1 and not run.fits(_forecast(found, 1 / share)):
            continue
        if not run.affordable([q.trial(choice)], 0.0 if fitting is None else run.repetitions(fitting)):
            run.left_out[words] = [q.trial(choice)]
            return None
        run.step([(choice, 0)])
        if run.wrong.get(choice, "").startswith("unsupported"):
            return None
        if (records := run.steps.get(choice)) is None:
            continue
        if run.held(records):
            return choice
        if (held := peak(records)) is not None:
            found[1 / share] = held
    return None


def _forecast(found: Mapping[float, float], part: float) -> float:
    """Return the bytes for that part of the batch, on the line through the last two of {part: bytes}."""
    (x, at_x), (y, at_y) = list(found.items())[-2:]
    return at_y + (at_y - at_x) * (part - y) / (y - x)


def larger(run: "Run") -> None:
    """Measure the fastest choice that fits with 2, 4 and 8 times the sequences, as far as memory allows.

    Of choices about as fast, use the one that will be advised. If memory does not allow 8 times, try checkpointed blocks.
    """
    q = run.question
    fitting = {choice: typical(records) for choice, records in run.steps.items() if run.held(records)}
    least = min(fitting.values(), default=math.inf)
    close = [choice for choice in fitting if fitting[choice] <= CLOSE * least]
    if run.room is None or not close:
        return
    best = min(close, key=lambda choice: preference(choice, q.have, peak(run.steps[choice])))
    if best.accumulate > 1:  # its own batch does not fit
        return
    run.larger, more = _grown(run, best, LARGER, run.steps[best], MORE)
    again = q.checkpointed(best)
    if not more or again is None:
        return
    trial = q.trial(again)
    if not run.affordable([trial]):
        run.left_out[AGAIN] = [trial]
        return
    (record,) = run.do([trial])
    if record.outcome != "ok":
        run.wrong[again] = f"{record.outcome}: {record.reason}"
        return
    grown, _ = _grown(run, again, more, [record], AGAIN)
    run.again = {q.batch: record, **grown}


def _grown(
    run: "Run", choice: Choice, factors: Sequence[int], records: Sequence[Record], words: str
) -> tuple[dict[int, Record], Sequence[int]]:
    """Return {batch: record} for the factors that fit, and the factors that do not.

    records: the step's, with the requested batch.
    """
    q, found = run.question, dict[int, Record]()
    held = {1.0: peak(records) or math.inf}
    for place, times in enumerate(factors):
        # Memory has a constant part and one that grows with the batch; with one peak known, assume that all of it grows.
        forecast = _forecast(held, times) if len(held) > 1 else times * held[1]
        if forecast > FILLED * (run.room or math.inf):
            return found, factors[place:]
        trial = q.of_batch(choice, times * q.batch)
        if run.affordable([trial] * times) < times:
            run.left_out[words] = [trial]
            return found, ()
        (record,) = run.do([trial])
        if record.outcome != "ok" or not run.held([record]):
            return found, factors[place:]
        found[times * q.batch] = record
        held[times] = peak([record]) or math.inf
    return found, ()
