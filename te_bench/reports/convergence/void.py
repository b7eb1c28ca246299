"""Say why a convergence study as a whole proves nothing: what its bf16, its A/A and its planted fault did."""

from collections.abc import Sequence

from te_bench.experiments.problems import TrainingProblem
from te_bench.experiments.spec import Trial
from te_bench.reports.convergence.equivalence import Verdict
from te_bench.reports.convergence.stability import overfitting
from te_bench.reports.convergence.study import StudyArm
from te_bench.reports.convergence.study_verdict import CAUGHT, ArmVerdict

EVALUATED_FULLY = 0.75  # of the steps; earlier evaluations of a preset with early_eval_tokens are shorter
FEWEST_POINTS = 3


def _why_overfitted(control: StudyArm, margin: float) -> str | None:
    """Return why final losses prove nothing if the control's loss ends above its minimum by more than the margin.

    The loss is the mean curve over seeds, at evaluations with as many tokens as the last: early ones may be shorter.
    """
    seeds = list(control.finals)
    at = common_steps((control,), seeds)
    if "early_eval_tokens" in control.trial.problem:
        at = [step for step in at if step > EVALUATED_FULLY * float(control.trial.problem["steps"] or 0)]
    if len(at) < FEWEST_POINTS:
        return None
    rise = overfitting(at, [losses_at(control, seed, at) for seed in seeds])
    if rise <= margin:
        return None
    return (
        f"bf16 overfits: its validation loss ends {rise:.2g} above its least, more than the margin {margin:g}. A lower "
        "final loss may then only mean less overfitting. Train for fewer steps, or on text that is seen once"
    )


def why_void(control: StudyArm, aa: ArmVerdict | None, broken: ArmVerdict | None, margin: float) -> str | None:
    """Return why the experiment proves nothing: bf16 diverges or overfits, is too noisy, or a fault is not caught."""
    if control.diverged:
        where, why = named_seeds(control.diverged), next(iter(control.diverged.values()))
        return f"bf16 itself diverged on {where} ({why}), and the seeds that are left are a biased choice"
    if too_long := _why_overfitted(control, margin):
        return too_long
    for finding, name in ((aa, "A/A"), (broken, "broken")):
        if finding is None:
            return f"the {name} configuration is missing, without which nothing shows that a difference would be seen"
    assert aa is not None
    assert broken is not None
    if aa.seeds and all(aa.arm.finals[seed] == control.finals[seed] for seed in aa.seeds):
        return (
            "the A/A configuration ended on the control's very losses: its perturbation was lost, and it shows no noise"
        )
    if aa.verdict is not Verdict.EQUIVALENT:
        return f"the A/A configuration, bf16 against itself, is not EQUIVALENT: {aa.judgement.reason}"
    if broken.verdict not in CAUGHT:
        longer = _more_steps(control.trial) if broken.judgement.comparison else ""
        why = "the fault planted on purpose was not caught, and a bad recipe might not be either"
        return f"{why}. Of the fault: {broken.judgement.reason}{longer}"
    return None


def _more_steps(control: Trial) -> str:
    """Return a sentence that says how to make the fault's gap larger."""
    p = TrainingProblem.of(control)
    if p.branch_at is None or p.steps is None:
        return ". More steps make its gap larger"
    return f". It had the last {p.steps - p.branch_at:,} steps to show: give a smaller --branch-at, or more --steps"


def common_steps(arms: Sequence[StudyArm], seeds: Sequence[int]) -> list[float]:
    """Return the steps at which every run was evaluated, in order. The first is before training."""
    steps = [set(arm.runs[seed].curve[0]) for arm in arms for seed in seeds]
    return sorted(set.intersection(*steps)) if steps else []


def losses_at(arm: StudyArm, seed: int, at: Sequence[float]) -> list[float]:
    by_step = dict(zip(*arm.runs[seed].curve, strict=True))
    return [by_step[step] for step in at]


def named_seeds(which: Sequence[int] | dict[int, str]) -> str:
    listed = [str(seed) for seed in which]
    return f"seed {listed[0]}" if len(listed) == 1 else f"seeds {', '.join(listed)}"
