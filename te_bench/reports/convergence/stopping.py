"""When a convergence run needs no more seeds of an arm: the sequential test that its plan fixed, asked before each trial."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from te_bench.experiments.spec import Experiment, Trial
from te_bench.experiments.store import Journal
from te_bench.reports.analysis.rows import from_journals
from te_bench.reports.convergence import sequential
from te_bench.reports.convergence.study import Run, Study, StudyArm, studies
from te_bench.reports.convergence.verdict import ALPHA, MARGIN, paired_seeds, why_diverged


def check_stop_early(experiment: Experiment, journal: Journal, environment_id: str) -> None:
    """Raise ValueError for --stop-early on a run that began without: the rule counts where it preceded the first step."""
    first = _first_judgement(experiment.suite, journal, environment_id)
    if "first_look" in experiment.judgement and first and "first_look" not in first:
        raise ValueError(
            "--stop-early: this run was planned without, and losses that may have been looked at cannot choose when to "
            "stop; leave it out, or begin anew with --fresh or another --out"
        )


def stopping_rule(suite: str, journal: Journal, environment_id: str) -> Callable[[Trial], str | None]:
    """needless(trial) for the runner, by the records so far; never a reason where the first plan has no look."""
    if "first_look" not in _first_judgement(suite, journal, environment_id):
        return lambda trial: None

    def needless(trial: Trial) -> str | None:
        study = _study(suite, journal, environment_id, trial)
        return None if study is None else why_needless(study, trial)

    return needless


def why_needless(study: Study, trial: Trial) -> str | None:
    """Why this trial of the study need not be run, or None.

    A recipe is spared the seeds after the look that decided it, each recipe tested at its share of alpha. Control, A/A
    and the broken recipe are what the others are judged beside: they go on until every configuration has been decided.
    """
    arm = next((arm for arm in study.arms if arm.trial.cell == trial.cell), None)
    if arm is None or not study.recipes:
        return None
    if arm.kind == "recipe":
        return why_decided(study, arm)
    others = [other for other in study.arms if other.kind != "control"]
    return "every configuration has been decided" if all(why_decided(study, other) for other in others) else None


def why_decided(study: Study, arm: StudyArm) -> str | None:
    """What the looks at this arm's pairs have shown, or None while they go on."""
    control = study.control
    if control is None or not study.looks:
        return None
    family = len(study.recipes) if arm.kind == "recipe" else 1
    alpha = study.number("alpha") or ALPHA
    return why_stopped(
        _in_order(arm, control),
        control,
        looks=study.looks,
        margin=study.number("margin") or MARGIN,
        alpha=alpha / family,
    )


def why_stopped(arm: StudyArm, control: StudyArm, *, looks: Sequence[int], margin: float, alpha: float) -> str | None:
    """Why no more seeds of this arm are needed, or None: the group-sequential rule over the pairs that have ended.

    alpha is the arm's own share: the family's over the number of recipes.
    """
    if reason := why_diverged(arm):
        return f"diverged: {reason}"
    seeds = paired_seeds(arm, control)
    if list(seeds) != [seed for seed in arm.runs if seed <= max(seeds, default=-1)]:
        return None  # the pairs are looked at in the order of their seeds
    decision = sequential.decide(
        [arm.finals[s] - control.finals[s] for s in seeds], looks=looks, margin=margin, alpha=alpha
    )
    return None if decision is None else f"{decision.verdict} {decision.reason}"


def _in_order(arm: StudyArm, control: StudyArm) -> StudyArm:
    """The arm up to the first seed whose pair has not ended.

    Side by side on several GPUs a later seed may end first, and a recipe diverge while its control, which may diverge
    too, is under way: neither tells anything yet.
    """
    ended = takewhile(lambda seed: _ended(arm.runs[seed]) and _ended(control.runs.get(seed)), arm.runs)
    return replace(arm, runs={seed: arm.runs[seed] for seed in ended})


def _ended(run: Run | None) -> bool:
    return run is not None and run.record is not None and run.row.outcome != "interrupted"


def _study(suite: str, journal: Journal, environment_id: str, trial: Trial) -> Study | None:
    """The study that the trial is part of, as te-bench verdict would read it now."""
    groups = from_journals({"": journal}).groups
    here = [group for group in groups if (group.suite, group.environment) == (suite, environment_id)]
    for study in (study for group in here for study in studies(group)):
        if any(arm.trial.cell == trial.cell for arm in study.arms):
            return study
    return None


def _first_judgement(suite: str, journal: Journal, environment_id: str) -> dict[str, object]:
    """What the first plan of this suite in this environment says that a verdict is judged by; {} before it."""
    plans = [p for p in journal.plans if (p.suite, p.environment) == (suite, environment_id) and p.judgement]
    return dict(min(plans, key=lambda plan: plan.started_at).judgement) if plans else {}
