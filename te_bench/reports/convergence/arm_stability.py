"""How stable each configuration of a study trained: divergences, spikes and rises, apart from its final losses."""

from collections.abc import Sequence
from dataclasses import dataclass

from te_bench.reports.convergence.stability import rate_bound, rate_p_value
from te_bench.reports.convergence.study import StudyArm
from te_bench.reports.convergence.study_verdict import StudyVerdict

POINTS = 1000  # logged points that spikes are counted per


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmStability:
    """Events of one arm's runs; None is what was not logged, or not compared."""

    name: str
    diverged: int
    ended: int  # runs with a result: a final loss, or a divergence
    rate_below: float | None  # the rate of divergence, with 95 % confidence
    p_value: float | None  # Fisher's exact test that it diverges at the control's rate
    loss_spikes: float | None  # per POINTS logged points
    grad_spikes: float | None
    highest_rise: float | None  # nat


def arm_stabilities(found: StudyVerdict) -> tuple[ArmStability, ...]:
    """Of every arm of a study that has a control."""
    control = found.study.control
    assert control is not None
    compared = [verdict.arm for verdict in found.findings]
    return tuple(_stability(arm, control if arm in compared else None) for arm in found.study.arms)


def _stability(arm: StudyArm, control: StudyArm | None) -> ArmStability:
    events, ended = len(arm.diverged), len(arm.ended)
    runs = [run.stability for run in arm.runs.values() if run.stability]
    others = (len(control.diverged), len(control.ended)) if control else (0, 0)
    return ArmStability(
        name=arm.name,
        diverged=events,
        ended=ended,
        rate_below=rate_bound(events, ended) if ended else None,
        p_value=rate_p_value((events, ended), others) if ended and others[1] else None,
        loss_spikes=_rate([(len(run.loss_spikes), run.loss_judged) for run in runs]),
        grad_spikes=_rate([(len(run.grad_spikes), run.grad_judged) for run in runs]),
        highest_rise=max((rise.height for run in runs for rise in run.rises), default=0.0) if runs else None,
    )


def _rate(counts: Sequence[tuple[int, int]]) -> float | None:
    judged = sum(n for _, n in counts)
    return POINTS * sum(k for k, _ in counts) / judged if judged else None
