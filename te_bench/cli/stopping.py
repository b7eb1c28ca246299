"""When a convergence run needs no more seeds of an arm: the sequential test that its plan fixed, asked before each trial."""

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_bench.experiments.spec import Experiment, Trial
    from te_bench.experiments.store import Journal
    from te_bench.reports.convergence.study import Arm, Run, Study


def check(experiment: "Experiment", journal: "Journal", environment_id: str) -> None:
    """Raise ValueError for --stop-early on a run that began without: the rule counts where it preceded the first step."""
    first = _first_judgement(experiment.suite, journal, environment_id)
    if "first_look" in experiment.judgement and first and "first_look" not in first:
        raise ValueError(
            "--stop-early: this run was planned without, and losses that may have been looked at cannot choose when to "
            "stop; leave it out, or begin anew with --fresh or another --out"
        )


def rule(suite: str, journal: "Journal", environment_id: str) -> "Callable[[Trial], str | None]":
    """needless(trial) for the runner, by the records so far; never a reason where the first plan has no look."""
    if "first_look" not in _first_judgement(suite, journal, environment_id):
        return lambda trial: None

    def needless(trial: "Trial") -> str | None:
        study = _study(suite, journal, environment_id, trial)
        return None if study is None else reason(study, trial)

    return needless


def reason(study: "Study", trial: "Trial") -> str | None:
    """Why this trial of the study need not be run, or None.

    A recipe is spared the seeds after the look that decided it, each recipe tested at its share of alpha. Control, A/A
    and the broken recipe are what the others are judged beside: they go on until every arm has been decided.
    """
    arm = next((arm for arm in study.arms if arm.trial.cell == trial.cell), None)
    if arm is None or not study.recipes:
        return None
    if arm.kind == "recipe":
        return _decided(study, arm)
    others = [other for other in study.arms if other.kind != "control"]
    return "every arm has been decided" if all(_decided(study, other) for other in others) else None


def _decided(study: "Study", arm: "Arm") -> str | None:
    """What the looks at this arm's pairs have shown, or None while they go on."""
    from te_bench.reports.convergence.verdict import ALPHA, MARGIN, stopper

    control = study.control
    if control is None or not study.looks:
        return None
    family = len(study.recipes) if arm.kind == "recipe" else 1
    alpha = study.number("alpha") or ALPHA
    return stopper(
        _in_order(arm, control),
        control,
        looks=study.looks,
        margin=study.number("margin") or MARGIN,
        alpha=alpha / family,
    )


def _in_order(arm: "Arm", control: "Arm") -> "Arm":
    """The arm up to the first seed whose pair has not ended.

    Side by side on several GPUs a later seed may end first, and a recipe diverge while its control, which may diverge
    too, is under way: neither tells anything yet.
    """
    ended = takewhile(lambda seed: _ended(arm.runs[seed]) and _ended(control.runs.get(seed)), arm.runs)
    return replace(arm, runs={seed: arm.runs[seed] for seed in ended})


def _ended(run: "Run | None") -> bool:
    return run is not None and run.record is not None and run.row.outcome != "interrupted"


def _study(suite: str, journal: "Journal", environment_id: str, trial: "Trial") -> "Study | None":
    """The study that the trial is part of, as te-bench verdict would read it now."""
    from te_bench.reports.analysis.rows import from_journals
    from te_bench.reports.convergence.study import studies

    groups = from_journals({"": journal}).groups
    here = [group for group in groups if (group.suite, group.environment) == (suite, environment_id)]
    for study in (study for group in here for study in studies(group)):
        if any(arm.trial.cell == trial.cell for arm in study.arms):
            return study
    return None


def _first_judgement(suite: str, journal: "Journal", environment_id: str) -> "dict[str, object]":
    """What the first plan of this suite in this environment says that a verdict is judged by; {} before it."""
    plans = [p for p in journal.plans if (p.suite, p.environment) == (suite, environment_id) and p.judgement]
    return dict(min(plans, key=lambda plan: plan.started_at).judgement) if plans else {}
