"""Predict the seconds and bytes of a step: those of a measured step, less the parts it loses, plus those it gains.

Pure arithmetic on records. A choice's frame is the measured step of the same mode and blocks, with the model's own
attention and head in bf16. Whatever a frame and a choice share cancels out.
If the GPU waits for Python in the frame, faster parts gain nothing. Otherwise an eager step takes at least the time of
its launches, at the rate of a step of the same model that waits.
In fused blocks and in te.convert's parts, a cast whose scale is known in advance is part of the kernel before it. There a
Linear with delayed scaling counts by its products alone; another recipe adds what it takes longer than delayed scaling.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from te_bench.advice.candidates import DELAYED, RECIPES, REPLACED, Choice, Question
from te_bench.advice.parts import LINEAR, Made, Part, PartTime, parts_of

#: The relative error of a part's time alone, for its time in a step: the clock and what lies in the L2 differ.
OF_PARTS = 0.10
#: The relative difference of a whole step between two processes.
OF_FRAME = 0.02
#: If its kernels fill less than this share of a step, the GPU waits for Python.
BUSY = 0.9
#: The largest share of a step that its parts may take together. Alone, parts may take longer, for example on a CPU,
#: where each has a call of its own from Python; all are then scaled down.
MOST = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Seconds of a step, within `bound_s`; memory in bytes, or None if its frame's is unknown."""

    choice: Choice
    seconds: float
    bound_s: float
    memory: float | None
    gains: Mapping[str, float]  # {workload: seconds that its parts save}
    parts: tuple[Part, ...]  # whose times the prediction uses


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A measured whole step: its seconds, and its peak of memory in bytes."""

    seconds: float
    memory: float | None
    kernels: float | None = None  # seconds of its GPU kernels, one after the other
    launches: int | None = None  # number of these kernels

    @property
    def waits(self) -> bool:
        """Whether the GPU waits for Python, so that faster kernels do not shorten the step."""
        return self.kernels is not None and self.kernels < BUSY * self.seconds


def predict(
    question: Question, made: Made, choice: Choice, frames: Mapping[Choice, Frame], times: Mapping[Part, PartTime]
) -> Prediction | None:
    """Return a choice's prediction; None if its frame or a differing part has no time, or if it is a rival's step."""
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
    """Return the seconds to launch a step's kernels, at the fastest rate of eager steps that wait; 0 if none does."""
    waiting = (f for choice, f in frames.items() if choice.mode == "eager" and f.waits and f.launches)
    rate = min((f.seconds / f.launches for f in waiting if f.launches), default=0.0)
    return rate * (frame.launches or 0)


def _seconds_in_kernels(part: Part, times: Mapping[Part, PartTime]) -> float:
    """Return the seconds of a part in blocks where other kernels do its casts."""
    time = times[part]
    if part.workload != LINEAR or not time.products:
        return time.seconds
    delayed = next((times[p] for name in (DELAYED, *REPLACED) if (p := part._replace(rival=name)) in times), None)
    if part.rival not in (*RECIPES, *REPLACED) or delayed is None:
        return time.products
    return time.products + max(0.0, time.seconds - delayed.seconds)


def _logits_saved(made: Made, choice: Choice, base: Choice) -> float:
    """Return the bytes of the logits and their gradient in half precision, which a chunked head does not keep.

    te.convert's parts keep none in any step.
    """
    if made.head is None or choice.head is None or base.head is not None or choice.parts:
        return 0.0
    rows, _, classes = made.head
    return 4.0 * rows * classes


def kind(choice: Choice) -> tuple[Choice, bool]:
    """Return the group of a choice; predictions of one group err alike."""
    return Choice(attention="", mode=choice.mode, fused=choice.fused, parts=choice.parts), choice.recipe is not None


def corrections(
    predictions: Mapping[Choice, Prediction], measured: Mapping[Choice, float]
) -> dict[tuple[Choice, bool], float]:
    """Return {kind: measured over predicted seconds, of its last verified step}."""
    return {
        kind(choice): seconds / predictions[choice].seconds
        for choice, seconds in measured.items()
        if choice in predictions and predictions[choice].seconds > 0
    }
