"""Decide before each trial whether a convergence run still needs it, by the looks of its plan."""

from collections.abc import Callable

from te_bench.experiments.spec import Trial
from te_bench.experiments.store import Journal
from te_bench.reports.analysis.rows import from_journals
from te_bench.reports.convergence import pool_study
from te_bench.reports.convergence.study import Study, studies
from te_bench.reports.convergence.verdict import judge_pool


def stopping_rule(suite: str, journal: Journal, environment_id: str) -> Callable[[Trial], str | None]:
    """Return needless(trial) for the runner, by the records so far; it returns None if the plan has no looks."""
    plans = [p for p in journal.plans if (p.suite, p.environment) == (suite, environment_id)]
    if not any("pool" in plan.judgement for plan in plans):
        return lambda trial: None

    def needless(trial: Trial) -> str | None:
        study = _study(suite, journal, environment_id, trial)
        return None if study is None else why_needless(study, trial)

    return needless


def why_needless(study: Study, trial: Trial) -> str | None:
    """Return why the study does not need this trial, or None.

    A recipe needs no more rounds after the look that decided it. bf16 needs more runs until every recipe and A/A are
    decided. The broken recipe has few runs and needs them all. A pilot has no looks: its means stay hidden from the run.
    """
    arm = next((arm for arm in study.arms if arm.trial.cell == trial.cell), None)
    if arm is None or not study.whole or study.pool is None or study.pilot or arm.kind == "broken":
        return None
    recipes, aa = judge_pool(study)
    decided = {name: pool_study.why_decided(study, judged, recipe=True) for name, judged in recipes.items()}
    if arm.kind == "recipe":
        return decided[arm.name]
    rest = aa and pool_study.why_decided(study, aa, recipe=False)
    return "every configuration has been decided" if rest and all(decided.values()) else None


def _study(suite: str, journal: Journal, environment_id: str, trial: Trial) -> Study | None:
    """Return the study of the trial, as te-bench verdict reads it."""
    groups = from_journals({"": journal}).groups
    here = [group for group in groups if (group.suite, group.environment) == (suite, environment_id)]
    for study in (study for group in here for study in studies(group)):
        if any(arm.trial.cell == trial.cell for arm in study.arms):
            return study
    return None
