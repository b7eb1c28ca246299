"""The fastest training step of each kind: te-bench's own, torch.compile's, eager PyTorch's, a peer's; by precision."""

from collections.abc import Sequence
from dataclasses import dataclass

from te_bench.experiments.spec import Trial
from te_bench.experiments.suites.speed import OWN
from te_bench.models import rivals
from te_bench.reports.analysis.measures import Ratio, speedup
from te_bench.reports.analysis.steps import MeasuredStep

#: Settings that only te-bench's own fast step has, and a user's model with te-bench's kernels in it.
OWN_PARTS = ("head", "optimizer", "blocks", "parts")
TE_BENCH, EAGER = "te-bench", "PyTorch, eager"


@dataclass(frozen=True, kw_only=True, slots=True)
class FastestOfKind:
    """The fastest configuration of one kind and precision, and its seconds over the fastest of all's, in pairs."""

    kind: str
    precision: str
    step: MeasuredStep
    seconds: float
    times_as_long: Ratio | None


def rival_of(trial: Trial) -> str | None:
    """What another project's step is called; None for te-bench's and PyTorch's."""
    name = str(trial.problem.get("rival") or trial.problem.get("linears") or "")
    if name in rivals.names():
        return rivals.load(name).title
    return name or None  # of a journal, which may know more rivals than this te-bench


def kind_of_step(trial: Trial) -> str:
    """Whose step a trial times."""
    if rival := rival_of(trial):
        return rival
    parts = any(trial.problem.get(part) for part in OWN_PARTS)
    if parts or trial.precision == "fp8" or trial.attention in OWN:
        return TE_BENCH
    return EAGER if trial.mode == "eager" else "torch.compile"


def fastest_of_each_kind(steps: Sequence[MeasuredStep]) -> tuple[FastestOfKind, ...]:
    """Of steps that come fastest first: one of each kind and precision, fastest first; of the baseline's kind, the baseline.

    The baseline stands for its kind because the speed-ups are quoted against it.
    """
    found: dict[tuple[str, str], tuple[float, MeasuredStep]] = {}
    for step in steps:
        trial = step.configuration.trial
        kind = kind_of_step(trial), trial.precision
        if step.latency_s is not None and (kind not in found or step.is_baseline):
            found[kind] = step.latency_s, step
    ordered = sorted(found.items(), key=lambda item: item[1][0])
    return tuple(
        FastestOfKind(
            kind=kind,
            precision=precision,
            step=step,
            seconds=seconds,
            times_as_long=speedup(step.configuration, ordered[0][1][1].configuration),
        )
        for (kind, precision), (seconds, step) in ordered
    )
