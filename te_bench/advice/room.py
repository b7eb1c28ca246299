"""The batch against memory: cut into micro-batches, by checkpointed blocks, or larger where there is room. No torch.

Both change what a step takes by more than any formula tells of a model that te-bench does not know: they are measured.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from te_bench.advice.candidates import Choice
from te_bench.advice.steps import CLOSE, peak, typical
from te_bench.experiments.spec import Record

if TYPE_CHECKING:
    from te_bench.advice.advise import Run

SMALLER, MORE, AGAIN = "smaller micro-batches", "a larger batch", "checkpointed blocks"
LARGER = (2, 4, 8)  # times the sequences, where there is room
FILLED = 0.9  # of the memory that there is, which a step may take by its forecast


def smaller(run: "Run") -> None:
    """Where no step fits: as many sequences at a time as do, and more of them at a time by checkpointed blocks.

    Each by the step of the least memory, else by what the user has.
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
    """The choice in ever more micro-batches, until one fits: that, or None.

    Two of them tell what does not grow with the batch: those that would not fit by that are not tried. The last is where
    nothing else fits. fitting: a step that does, which is repeated before another is tried.
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
    """Bytes of that part of the batch, on the line through the last two of {part: bytes}."""
    (x, at_x), (y, at_y) = list(found.items())[-2:]
    return at_y + (at_y - at_x) * (part - y) / (y - x)


def larger(run: "Run") -> None:
    """Twice, four and eight times as many sequences by the fastest choice that fits, as far as the room is for them.

    Of choices that are close to it, by that with the fewest changes. Where the room ends before, by its checkpointed blocks.
    """
    q = run.question
    fitting = {choice: typical(records) for choice, records in run.steps.items() if run.held(records)}
    least = min(fitting.values(), default=math.inf)
    close = [choice for choice in fitting if fitting[choice] <= CLOSE * least]
    if run.room is None or not close:
        return
    best = min(close, key=lambda choice: choice.changes(q.have))
    if best.accumulate > 1:  # not even its own batch fits
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
    """Steps of so many times the sequences, by batch, and the factors that there was no room for.

    records: of the batch that was asked for.
    """
    q, found = run.question, dict[int, Record]()
    held = {1.0: peak(records) or math.inf}
    for place, times in enumerate(factors):
        # It takes what any batch takes, and what grows with it: at most all of it.
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
