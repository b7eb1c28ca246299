"""Seconds and bytes of a step that was not measured: a measured step, less the parts it does without, plus those it has.

Pure arithmetic on what records hold. A choice's frame is the measured step of its mode and blocks, with the model's own
attention and head in bf16. What a frame and a choice share cancels out, whatever it is.
Where the GPU waits for Python in the frame, faster parts gain nothing. Elsewhere an eager step takes no less than its
launches take in a step of the same model that waits.
In fused blocks, and in those of te.convert's parts, a cast is part of the kernel before it where its scale is known by then:
there a Linear by delayed scaling counts by its products alone, and by another recipe by as much more as it takes alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from te_bench.advice.candidates import DELAYED, RECIPES, Choice, Question
from te_bench.advice.parts import LINEAR, Made, Part, PartTime, parts_of

#: What a part may take more or less in a step than alone: its operands lie in the L2, or do not; the clock is another.
OF_PARTS = 0.10
#: What a whole step varies from one process to the next.
OF_FRAME = 0.02
#: Of a step a GPU's kernels fill at least so much where Python is fast enough at launching them.
BUSY = 0.9
#: Of a step its parts take at most so much: alone they may take longer, each with a call of its own from Python on a CPU,
#: and then all count for as much less.
MOST = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Seconds of a step, give or take `bound_s`; memory in bytes, None where its frame's is not known."""

    choice: Choice
    seconds: float
    bound_s: float
    memory: float | None
    gains: Mapping[str, float]  # seconds that each kind of part saves
    parts: tuple[Part, ...]  # that it rests on


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A step that was measured as a whole: its seconds and its peak of memory in bytes."""

    seconds: float
    memory: float | None
    kernels: float | None = None  # seconds of its GPU's kernels, one after the other
    launches: int | None = None  # of them

    @property
    def waits(self) -> bool:
        """Whether its GPU waits for Python, so that no faster kernel makes it faster."""
        return self.kernels is not None and self.kernels < BUSY * self.seconds


def predict(
    question: Question, made: Made, choice: Choice, frames: Mapping[Choice, Frame], times: Mapping[Part, PartTime]
) -> Prediction | None:
    """None where its frame, or a part in which it differs from that, has no time, and for a rival's step, measured whole."""
    if choice.rival:
        return None
    base = question.frame(choice)
    frame = frames.get(base)
    if frame is None:
        return None
    ours, whole = parts_of(question, made, choice), parts_of(question, made, base)
    differing = [*(ours - whole), *(whole - ours)]
    if not all(part in times for part in differing):
        return None
    in_kernels = choice.fused or choice.parts is not None
    seconds_of = {part: _seconds_in_kernels(part, times) if in_kernels else one.seconds for part, one in times.items()}
    alone = sum(count * seconds_of.get(part, 0.0) for part, count in whole.items())
    share = min(1.0, MOST * frame.seconds / alone) if alone else 1.0
    gains: dict[str, float] = {}
    bound = (OF_FRAME * frame.seconds) ** 2
    for part in differing:
        count, seconds = whole[part] - ours[part], share * seconds_of[part]
        gains[part.workload] = gains.get(part.workload, 0.0) + count * seconds
        bound += (OF_PARTS * count * seconds) ** 2
    gained = sum(gains.values())
    seconds = frame.seconds - (min(gained, 0.0) if frame.waits else gained)
    if choice.mode == "eager" and not frame.waits:
        seconds = max(seconds, min(frame.seconds, _launching(frame, frames)))
    seconds = max(seconds, 0.0)
    memory = None if frame.memory is None else frame.memory - _logits_saved(made, choice, base)
    return Prediction(
        choice=choice, seconds=seconds, bound_s=bound**0.5, memory=memory, gains=gains, parts=tuple(differing)
    )


def _launching(frame: Frame, frames: Mapping[Choice, Frame]) -> float:
    """Seconds that Python takes to launch a step's kernels, by the fastest rate of eager steps that wait; 0 without one."""
    waiting = (f for choice, f in frames.items() if choice.mode == "eager" and f.waits and f.launches)
    rate = min((f.seconds / f.launches for f in waiting if f.launches), default=0.0)
    return rate * (frame.launches or 0)


def _seconds_in_kernels(part: Part, times: Mapping[Part, PartTime]) -> float:
    """Seconds of a part in blocks whose casts other kernels do."""
    time = times[part]
    if part.workload != LINEAR or not time.products:
        return time.seconds
    delayed = times.get(part._replace(rival=DELAYED))
    if part.rival not in RECIPES or delayed is None:
        return time.products
    return time.products + max(0.0, time.seconds - delayed.seconds)


def _logits_saved(made: Made, choice: Choice, base: Choice) -> float:
    """Bytes of logits and their gradient in half precision, which a head in chunks does not keep."""
    if made.head is None or choice.head is None or base.head is not None:
        return 0.0
    rows, _, classes = made.head
    return 4.0 * rows * classes


def kind(choice: Choice) -> tuple[Choice, bool]:
    """What predictions err alike over."""
    return Choice(attention="", mode=choice.mode, fused=choice.fused, parts=choice.parts), choice.recipe is not None


def corrections(
    predictions: Mapping[Choice, Prediction], measured: Mapping[Choice, float]
) -> dict[tuple[Choice, bool], float]:
    """{kind: times the prediction that its last verified step took}."""
    return {
        kind(choice): seconds / predictions[choice].seconds
        for choice, seconds in measured.items()
        if choice in predictions and predictions[choice].seconds > 0
    }
