"""The fastest training step of each kind: te-bench's own, torch.compile's, eager PyTorch's, a peer's; by precision."""

from collections.abc import Sequence
from dataclasses import dataclass

from te_bench.reports.analysis.measures import Ratio, speedup
from te_bench.reports.analysis.naming import plain_names, whose
from te_bench.reports.analysis.steps import MeasuredStep


@dataclass(frozen=True, kw_only=True, slots=True)
class FastestOfKind:
    """The fastest configuration of one kind and precision, and its seconds over the fastest of all's, in pairs.

    name: what tells it from those of the other kinds.
    """

    kind: str
    name: str
    step: MeasuredStep
    seconds: float
    times_as_long: Ratio | None


def fastest_of_each_kind(steps: Sequence[MeasuredStep]) -> tuple[FastestOfKind, ...]:
    """Of steps that come fastest first: one of each kind and precision, fastest first; of the baseline's kind, the baseline.

    The baseline stands for its kind because the speed-ups are quoted against it.
    """
    found: dict[tuple[str, str], tuple[float, MeasuredStep]] = {}
    for step in steps:
        trial = step.configuration.trial
        kind = whose(trial), trial.precision
        if step.latency_s is not None and (kind not in found or step.is_baseline):
            found[kind] = step.latency_s, step
    ordered = sorted(found.items(), key=lambda item: item[1][0])
    names = plain_names({step.configuration.id: step.configuration.trial for _, (_, step) in ordered})
    return tuple(
        FastestOfKind(
            kind=kind,
            name=names[step.configuration.id],
            step=step,
            seconds=seconds,
            times_as_long=speedup(step.configuration, ordered[0][1][1].configuration),
        )
        for (kind, _), (seconds, step) in ordered
    )
