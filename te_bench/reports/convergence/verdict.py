"""Judge convergence: does each FP8 recipe train like bf16, and would this experiment have detected it if not?

Every claim is about final validation losses, evaluated in bf16: of runs that share seeds with the bf16 control, or of runs
against a pool of bf16 runs that all recipes share (`pool_study`). A verdict is void unless the A/A arm (bf16 again, one ulp
away) is EQUIVALENT and the recipe broken on purpose is caught.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from te_bench.experiments.suites.convergence import BROKEN, TRUNKS
from te_bench.reports.analysis.rows import Group
from te_bench.reports.convergence import pool_study
from te_bench.reports.convergence.band import band
from te_bench.reports.convergence.equivalence import CandidateVerdict, Verdict, copies, judge
from te_bench.reports.convergence.speedup import Speedup, capability_matched
from te_bench.reports.convergence.study import LEFT, Study, StudyArm, studies
from te_bench.reports.convergence.study_verdict import ArmVerdict, StudyVerdict
from te_bench.reports.convergence.void import common_steps, losses_at, named_seeds, why_void

#: In nat: 1.25 of the least standard deviation over seeds that is known (`loss_verdict.RUNS_SD`).
MARGIN, ALPHA = 0.003, 0.05
DECAYED = 0.1  # the learning rate must have decayed to this share of its peak
#: The note on a study whose planned runs are not done.
HIDDEN = (
    "Until the planned runs of a configuration are done its gap and its losses are hidden, so that nobody stops or changes "
    "the study by an interim answer; how far they vary (±) is shown"
)


def judge_group(group: Group) -> tuple[tuple[StudyVerdict, ...], frozenset[str]]:
    """Return the verdicts on a group's studies, and the ids of configurations whose losses no page shows.

    These are all of a pilot, and those of a study whose planned runs are not done.
    """
    found = studies(group)
    verdicts = tuple(judge_study(study) for study in found if study.whole)
    arms = [arm for study in found if study.pilot for arm in study.arms]
    arms += [finding.arm for verdict in verdicts for finding in verdict.findings if finding.hidden]
    return verdicts, frozenset(arm.configuration.id for arm in arms)


def judge_study(study: Study, *, margin: float | None = None, alpha: float | None = None) -> StudyVerdict:
    """Return a study's verdict by the margin and alpha of its plan, or by others, which the notes then say.

    Raises ValueError for an invalid margin or alpha, and for a study without a control or recipes.
    """
    control = study.control
    if control is None or not study.recipes:
        raise ValueError(f"{study.title}: no bf16 control and recipe to compare; run te-bench run convergence")
    notes: list[str] = []
    bar = _setting(study, "margin", margin, MARGIN, notes)
    level = _setting(study, "alpha", alpha, ALPHA, notes)
    if study.pilot:
        return _of_pilot(study, bar, level)
    judged = _judge_recipes(study, control, bar, level)
    aa, broken = (
        None if arm is None else _arm_verdict(study, control, arm, _judge_alone(study, control, arm, bar, level))
        for arm in (study.aa, study.broken)
    )
    # What hides a gap is the plan: by a wider margin an early look would decide what the plan has not.
    by_plan = [study.number(name) or asked for name, asked in (("margin", bar), ("alpha", level))]
    planned = judged if by_plan == [bar, level] else _judge_recipes(study, control, *by_plan)
    recipes = tuple(_arm_verdict(study, control, arm, judged[arm.name], planned[arm.name]) for arm in study.recipes)
    void = spoilt = why_void(control, aa, broken, bar)
    runs = sum(len(arm.runs) for arm in study.arms)
    unfinished = study.to_go > 0 and not study.broken_off and _is_open(control, recipes, aa, broken)
    if unfinished:
        void = f"{study.to_go} of {runs} trials"
    elif study.broken_off:
        void = f"exploration, broken off after {runs - study.to_go} of {runs} runs: {study.broken_off}"
    hidden = [HIDDEN] if any(found is not None and found.hidden for found in (*recipes, aa, broken)) else []
    return StudyVerdict(
        study=study,
        margin=bar,
        alpha=level,
        recipes=recipes,
        aa=aa,
        broken=broken,
        void=void,
        unfinished=unfinished,
        sound=spoilt is None,
        exploration=bool(notes),
        notes=(*study.notes, *notes, *hidden, *_note_trunks(study), *_note_outliers(study, (*recipes, aa))),
    )


def _of_pilot(study: Study, margin: float, alpha: float) -> StudyVerdict:
    """Return a pilot's verdict, which hides its means: a plan chosen by a mean would be biased."""
    why = "these runs are a pilot: te-bench plan convergence reads their spread, and their means stay hidden"
    recipes = tuple(
        ArmVerdict(arm=arm, seeds=(), judgement=_inconclusive("a pilot", len(study.recipes))) for arm in study.recipes
    )
    return StudyVerdict(
        study=study,
        margin=margin,
        alpha=alpha,
        recipes=recipes,
        aa=None,
        broken=None,
        void=why,
        exploration=False,
        notes=study.notes,
    )


def _note_trunks(study: Study) -> list[str]:
    apart = {
        arm.name: sorted({seed for side in study.beside(arm) for seed in _of_two_trunks(arm, side)})
        for arm in study.arms
    }
    return [
        f"{name}, {named_seeds(seeds)}: left out: a trunk was trained again, so it does not start from bf16's trunk"
        for name, seeds in apart.items()
        if seeds
    ]


def _note_outliers(study: Study, findings: Sequence[ArmVerdict | None]) -> list[str]:
    """Return a note for each outlier: a gap, or beside a pool a loss, far from the others of its arm."""
    said = []
    for finding in findings:
        if finding is None or (c := finding.judgement.comparison) is None:
            continue
        for place in c.outliers:
            if not c.paired:
                seed, loss = list(finding.arm.finals.items())[place]
                said.append(
                    f"{finding.arm.name}, seed {seed}: its loss {loss:.4f} lies far from the others'; where such outliers "
                    "are common the error rate may not hold"
                )
                continue
            seed = finding.seeds[place]
            gap = finding.arm.finals[seed] - study.base(finding.arm)[seed]
            said.append(
                f"{finding.arm.name}, seed {seed}: its gap {gap:+.2g} lies far from the others, whose mean is "
                f"{(c.gap * c.n - gap) / (c.n - 1):+.2g}; where such outliers are common the error rate may not hold"
            )
    return said


def judge_noise(study: Study, *, margin: float | None = None, alpha: float | None = None) -> CandidateVerdict | None:
    """Return A/A's verdict against the control: whether these seeds could show a margin. None if either is missing."""
    if study.control is None or study.aa is None:
        return None
    bar, level = (_setting(study, *setting, []) for setting in (("margin", margin, MARGIN), ("alpha", alpha, ALPHA)))
    return _judge_alone(study, study.control, study.aa, bar, level)


def _setting(study: Study, name: str, asked: float | None, default: float, notes: list[str]) -> float:
    """Return the asked value, else the plan's, else the default; add a note if the plan has another."""
    planned = study.number(name)
    if asked is None:
        return default if planned is None else planned
    if planned is not None and asked not in (planned, study.number("tighter") if name == "margin" else None):
        notes.append(f"{name} {asked:g} was chosen after the plan, which says {planned:g}")
    return asked


def paired_seeds(study: Study, arm: StudyArm) -> tuple[int, ...]:
    """Return the seeds whose runs of the arm and of bf16 ended, did not diverge, and share their trunk if they branch."""
    sides = study.beside(arm)
    apart = {*arm.diverged, *(seed for side in sides for seed in (*side.diverged, *_of_two_trunks(arm, side)))}
    return tuple(seed for seed in arm.finals if all(seed in side.finals for side in sides) and seed not in apart)


def _of_two_trunks(arm: StudyArm, control: StudyArm) -> list[int]:
    """Return the seeds whose runs continued different weights: a lost trunk that a GPU trains again differs."""
    both = [seed for seed in arm.finals if seed in control.finals]
    return [seed for seed in both if arm.runs[seed].trunk != control.runs[seed].trunk]


def why_diverged(arm: StudyArm) -> str | None:
    """Return why the arm counts as diverged, or None."""
    if not arm.diverged:
        return None
    return f"{len(arm.diverged)} of {len(arm.ended)} runs, {named_seeds(arm.diverged)}: {next(iter(arm.diverged.values()))}"


def _judge_recipes(study: Study, control: StudyArm, margin: float, alpha: float) -> dict[str, CandidateVerdict]:
    """Return a verdict for every recipe. Holm's family is all recipes; a diverged or untestable one has p = 1."""
    found: dict[str, CandidateVerdict] = {}
    arms, diverged = {}, {}
    family = len(study.recipes)
    for arm in study.recipes:
        if reason := why_diverged(arm):
            diverged[arm.name] = reason
        elif reason := _why_untestable(study, arm, control):
            found[arm.name] = _inconclusive(reason, family)
        else:
            arms[arm.name] = _pair(study, arm)
    if study.pool is not None:
        broken = {n: CandidateVerdict(verdict=Verdict.DIVERGED, reason=r, family=family) for n, r in diverged.items()}
        return pool_study.judge_recipes(study, margin, alpha, found | broken)
    untested = {name: judgement.reason for name, judgement in found.items()}
    primary = None if study.primary is None else study.primary.name
    judged = judge(arms, margin=margin, alpha=alpha, diverged=diverged | untested, primary=primary)
    untold = Verdict.INCONCLUSIVE
    return {name: replace(one, verdict=untold) if name in untested else one for name, one in judged.items()}


def judge_pool(study: Study) -> tuple[dict[str, CandidateVerdict], CandidateVerdict | None]:
    """Return the verdicts of every recipe and of A/A, in a study with a pool, by the plan's margin and alpha."""
    assert study.control is not None
    margin, alpha = study.number("margin") or MARGIN, study.number("alpha") or ALPHA
    aa = None if study.aa is None else _judge_alone(study, study.control, study.aa, margin, alpha)
    return _judge_recipes(study, study.control, margin, alpha), aa


def _pair(study: Study, arm: StudyArm) -> tuple[list[float], list[float]]:
    """Return the arm's final losses and bf16's, by the seeds that they share."""
    seeds, base = paired_seeds(study, arm), study.base(arm)
    return [arm.finals[seed] for seed in seeds], [base[seed] for seed in seeds]


def _judge_alone(study: Study, control: StudyArm, arm: StudyArm, margin: float, alpha: float) -> CandidateVerdict:
    """Return the verdict of A/A or the broken recipe, which are tested outside of Holm's family."""
    if reason := why_diverged(arm):
        return CandidateVerdict(verdict=Verdict.DIVERGED, reason=reason, family=1)
    if reason := _why_untestable(study, arm, control):
        return _inconclusive(reason, 1)
    if study.pool is not None and arm.kind == "aa":
        return pool_study.judge_aa(study, margin, alpha)
    if study.pool is not None:  # the broken recipe has few runs and no looks
        pair, paired = (list(arm.finals.values()), list(control.finals.values())), False
    else:
        pair, paired = _pair(study, arm), True
    return judge({arm.name: pair}, margin=margin, alpha=alpha, paired=paired)[arm.name]


def _why_untestable(study: Study, arm: StudyArm, control: StudyArm) -> str | None:
    """Return why an arm cannot be tested, whatever its losses are, or None."""
    p = arm.trial.problem
    peak, least = float(p.get("learning_rate") or 0), float(p.get("min_learning_rate") or 0)
    if least > DECAYED * peak:
        return f"the learning rate came down to {least:g} of {peak:g} only: gaps before the end of a decay are of the moment"
    if study.pool is None and (missing := _missing_seeds(study, arm)):
        return missing
    for side in (arm, *study.beside(arm)):
        seeds = list(side.finals)
        if found := copies(list(side.finals.values())):
            return (
                f"{side.name}, {named_seeds([seeds[i] for i in found])} ended on the very same loss, "
                f"{side.finals[seeds[found[0]]]:.10g}: they are one run, which says nothing of how far seeds move it"
            )
    if study.pool is not None:
        few = min(len(arm.finals), len(control.finals))
        return None if few > 1 else f"{few} run: the noise between runs cannot be known from fewer than 2"
    n = len(paired_seeds(study, arm))
    if study.branch_at is not None and n < TRUNKS and arm.kind != "broken":
        return f"{n} pairs that share a trunk: a verdict on branches takes {TRUNKS} trunks"
    return None if n > 1 else f"{n} pair of seeds: the noise between seeds cannot be known from fewer than 2"


def _missing_seeds(study: Study, arm: StudyArm) -> str | None:
    """Return a sentence about planned seeds whose pair has no result and did not diverge, or None."""
    planned = study.number("seeds")
    for side in (arm, *study.beside(arm)):
        lost = {seed: run.row.outcome for seed, run in side.runs.items() if run.final is None and not run.diverged}
        if lost:
            said = {"the last evaluation is missing" if outcome == "ok" else outcome for outcome in lost.values()}
            return f"{side.name} has no result for {named_seeds(lost)} ({', '.join(sorted(said))})"
        faults = study.number("fault_runs") or BROKEN
        wanted = planned if planned is None or side.kind != "broken" else min(planned, faults)
        if wanted is not None and len(side.runs) < wanted:
            return f"{side.name} has {len(side.runs)} of the {wanted:g} seeds of the plan"
    for side in study.beside(arm):
        only = set(arm.runs) - set(side.runs) if arm.kind == "broken" else set(arm.runs) ^ set(side.runs)
        if only:
            return f"{named_seeds(sorted(only))} was run in one of {arm.name} and {side.name} only: pairs need both"
    return None


def _unfinished(study: Study, arm: StudyArm, judgement: CandidateVerdict) -> str | None:
    """Return a sentence about rounds of a pool's plan without a result, or None once a look has decided the arm.

    The planted fault has no looks: its runs that are to go.
    """
    if arm.kind == "broken":
        left = {seed: run.row.outcome for seed, run in arm.runs.items() if run.row.outcome in LEFT}
        return (
            f"{arm.name} has no result for {named_seeds(left)} ({', '.join(sorted(set(left.values())))})"
            if left
            else None
        )
    if pool_study.why_decided(study, judgement, recipe=arm.kind == "recipe"):
        return None
    lost = {seed: run.row.outcome for seed, run in arm.runs.items() if run.final is None and not run.diverged}
    if set(lost.values()) == {"stopped"} and len(arm.runs) >= study.rounds:
        return None  # a look decided the plan's margin, and this verdict is by a tighter one
    why = f"{arm.name} has {len(arm.finals)} of the {study.rounds} rounds of the plan"
    return f"{why} ({named_seeds(lost)}: {', '.join(sorted(set(lost.values())))})" if lost else why


def _inconclusive(reason: str, family: int) -> CandidateVerdict:
    return CandidateVerdict(verdict=Verdict.INCONCLUSIVE, reason=reason, family=family)


def _is_open(
    control: StudyArm, recipes: Sequence[ArmVerdict], aa: ArmVerdict | None, broken: ArmVerdict | None
) -> bool:
    """Return whether the remaining runs may decide something: A/A, the fault, or all recipes have no verdict yet."""
    if control.diverged or aa is None or broken is None:
        return False
    undecided = Verdict.INCONCLUSIVE
    return undecided in (aa.verdict, broken.verdict) or all(found.verdict is undecided for found in recipes)


def _arm_verdict(
    study: Study, control: StudyArm, arm: StudyArm, judgement: CandidateVerdict, planned: CandidateVerdict | None = None
) -> ArmVerdict:
    """Return an arm's verdict; planned: by the plan's margin, if `judgement` may be by another."""
    seeds, c, sides = paired_seeds(study, arm), judgement.comparison, study.beside(arm)
    missing = _missing_seeds(study, arm) if study.pool is None else _unfinished(study, arm, planned or judgement)
    if missing and study.judgement and not study.broken_off:
        untold = judgement if judgement.verdict is Verdict.DIVERGED else _inconclusive(missing, judgement.family)
        return ArmVerdict(arm=arm, seeds=seeds, judgement=untold, missing=missing, hidden=True)
    native_gap, trained_gap = (
        None if c is None else _gap_beside(ours, theirs, seeds, paired=c.paired)
        for ours, theirs in ((arm.natives, study.base(arm)), (arm.trained, study.base(arm, lambda side: side.trained)))
    )
    at = common_steps((*sides, arm), seeds)
    ours = [losses_at(arm, seed, at) for seed in seeds]
    theirs = [np.mean([losses_at(side, seed, at) for side in sides], axis=0).tolist() for seed in seeds]
    return ArmVerdict(
        arm=arm,
        seeds=seeds,
        judgement=judgement,
        native_gap=native_gap,
        trained_gap=trained_gap,
        # Survivors of a divergence are a biased choice. For branches, steps are faster in only a part of the training.
        speedup=None if c is None or not at or study.branch_at else _speedup(control, theirs, arm, seeds, at),
        band=band(at, ours, theirs) if at else None,
        gap_curve=(tuple(at), tuple(np.mean(np.subtract(ours, theirs), axis=0).tolist()) if at else ()),
        missing=missing,
    )


def _gap_beside(
    ours: Mapping[int, float], theirs: Mapping[int, float], seeds: Sequence[int], *, paired: bool
) -> float | None:
    """Return the mean gap of other losses, which the verdict does not use; None for fewer than two pairs or runs."""
    if paired:
        both = [seed for seed in seeds if seed in ours and seed in theirs]
        return float(np.mean([ours[seed] - theirs[seed] for seed in both])) if len(both) > 1 else None
    sides = list(ours.values()), list(theirs.values())
    return float(np.mean(sides[0]) - np.mean(sides[1])) if min(map(len, sides)) > 1 else None


def _speedup(
    control: StudyArm, curves: Sequence[Sequence[float]], arm: StudyArm, seeds: Sequence[int], at: Sequence[float]
) -> Speedup | None:
    """Return the speed-up of an arm's steps; curves: bf16's losses at these steps, by seed."""
    timed = [s for s in seeds if control.runs[s].step_s and arm.runs[s].step_s]
    if not timed:
        return None
    within = [s for s in timed if control.runs[s].host == arm.runs[s].host]
    return capability_matched(
        at,
        curves,
        [arm.finals[s] for s in seeds],
        control_step_s=[control.runs[s].step_s or 0.0 for s in within],
        candidate_step_s=[arm.runs[s].step_s or 0.0 for s in within],
        across_hosts=len(timed) - len(within),
    )
