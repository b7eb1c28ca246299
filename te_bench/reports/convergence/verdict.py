"""The convergence verdict: does each FP8 recipe train like bf16, and would this experiment have noticed if it did not?

Every claim is about final validation losses, evaluated in bf16, of runs that share seeds with the bf16 control. It is void
unless the A/A arm (bf16 again, one ulp away) is EQUIVALENT and the recipe broken on purpose is caught.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from te_bench.reports.convergence import sequential
from te_bench.reports.convergence.band import Band, band
from te_bench.reports.convergence.equivalence import Comparison, Judgement, Verdict, compare, copies, judge
from te_bench.reports.convergence.speedup import Speedup, capability_matched
from te_bench.reports.convergence.stability import overfitting, rate_bound, rate_p_value
from te_bench.reports.convergence.study import Arm, Study

MARGIN, ALPHA = 0.003, 0.05  # nat: 1.6 seed standard deviations of a 124M model (facts: modded-nanogpt, 0.0019)
DECAYED = 0.1  # the share of its peak that the learning rate must have come down to
EVALUATED_FULLY = 0.75  # of the steps: before, a preset with early_eval_tokens evaluates that many only
FEWEST_POINTS = 3
PASSED, FAILED, UNDECIDED, INCOMPLETE = 0, 1, 3, 4  # exit codes
GOOD = (Verdict.EQUIVALENT, Verdict.NON_INFERIOR)
CAUGHT = (Verdict.INFERIOR, Verdict.DIVERGED)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is known of one arm against the control."""

    arm: Arm
    seeds: tuple[int, ...]  # that ended in both
    judgement: Judgement
    native: Comparison | None = None  # the arm's losses evaluated as it trains; says nothing of the verdict
    trained: Comparison | None = None  # of the training loss over the last tenth of the steps; likewise
    speedup: Speedup | None = None
    band: Band | None = None
    missing: str | None = None  # planned seeds without a result

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def divergences(self) -> tuple[int, int]:
        """(runs that diverged, runs that ended or diverged)."""
        return len(self.arm.diverged), len(self.arm.ended)

    @property
    def divergence_bound(self) -> float | None:
        """The rate of divergence lies below this with 95 % confidence."""
        events, runs = self.divergences
        return rate_bound(events, runs) if runs else None


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """The findings of one study and what they add up to."""

    study: Study
    margin: float
    alpha: float
    recipes: tuple[Finding, ...]
    aa: Finding | None
    broken: Finding | None
    void: str | None  # why none of it counts
    exploration: bool  # margin or alpha were chosen after the plan
    notes: tuple[str, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in (*self.recipes, self.aa, self.broken) if finding is not None)

    @property
    def exit_code(self) -> int:
        """4 void or incomplete, 1 a recipe is INFERIOR or DIVERGED, 3 one is INCONCLUSIVE, 0 all are as good as bf16.

        Exploration passes nothing: 3 in place of 0.
        """
        if self.void:
            return INCOMPLETE
        if any(finding.verdict in CAUGHT for finding in self.recipes):
            return FAILED
        if any(finding.missing for finding in self.recipes):
            return INCOMPLETE
        good = all(finding.verdict in GOOD for finding in self.recipes)
        return PASSED if good and not self.exploration else UNDECIDED

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.void:
            return f"No verdict: {self.void}."
        said = {
            Verdict.EQUIVALENT: ("trains", "train", f" like bf16 (final loss within {self.margin:g} nat)"),
            Verdict.NON_INFERIOR: ("is", "are", f" not worse than bf16 by {self.margin:g} nat"),
            Verdict.INFERIOR: ("ends", "end", f" more than {self.margin:g} nat above bf16"),
            Verdict.DIVERGED: ("diverged", "diverged", ""),
            Verdict.INCONCLUSIVE: ("is", "are", " undecided"),
        }
        parts = []
        for verdict, (one, several, what) in said.items():
            names = [self._named(f) for f in self.recipes if f.verdict is verdict]
            if names:
                parts.append(f"{verdict}: {', '.join(names)} {one if len(names) == 1 else several}{what}")
        return ("Exploration, no test: " if self.exploration else "") + "; ".join(parts) + "."

    def _named(self, finding: Finding) -> str:
        needed = finding.judgement.seeds_needed
        if finding.verdict is Verdict.INCONCLUSIVE and needed:
            return f"{finding.arm.name} (at least {needed} seeds needed)"
        return finding.arm.name


def verdicts(study: Study, *, margin: float | None = None, alpha: float | None = None) -> Verdicts:
    """Judge a study by the margin and alpha of its plan, or by others, which is then said.

    Raises ValueError for a margin or alpha that is not possible, and a study without a control or without recipes.
    """
    control = study.control
    if control is None or not study.recipes:
        raise ValueError(f"{study.title}: no bf16 control and recipe to compare; run te-bench run convergence")
    notes: list[str] = []
    bar = _chosen(study, "margin", margin, MARGIN, notes)
    level = _chosen(study, "alpha", alpha, ALPHA, notes)
    judged = _judgements(study, control, bar, level)
    aa, broken = (
        None if arm is None else _finding(study, control, arm, _alone(study, control, arm, bar, level))
        for arm in (study.aa, study.broken)
    )
    recipes = tuple(_finding(study, control, arm, judged[arm.name]) for arm in study.recipes)
    return Verdicts(
        study=study,
        margin=bar,
        alpha=level,
        recipes=recipes,
        aa=aa,
        broken=broken,
        void=_void(control, aa, broken, bar),
        exploration=bool(notes),
        notes=(*study.notes, *notes, *_far(control, (*recipes, aa))),
    )


def _far(control: Arm, findings: Sequence[Finding | None]) -> list[str]:
    """A note of each gap that lies far from the others of its arm: the mean rests on it."""
    said = []
    for finding in findings:
        if finding is None or (c := finding.judgement.comparison) is None:
            continue
        for place in c.outliers:
            seed = finding.seeds[place]
            gap = finding.arm.finals[seed] - control.finals[seed]
            said.append(
                f"{finding.arm.name}, seed {seed}: its gap {gap:+.2g} lies far from the others, whose mean is "
                f"{(c.gap * c.n - gap) / (c.n - 1):+.2g}; where such outliers are common the error rate may not hold"
            )
    return said


def noise(study: Study, *, margin: float | None = None, alpha: float | None = None) -> Judgement | None:
    """A/A against the control, which needs no recipe: whether these seeds could tell a margin. None without either."""
    if study.control is None or study.aa is None:
        return None
    bar, level = (_chosen(study, *setting, []) for setting in (("margin", margin, MARGIN), ("alpha", alpha, ALPHA)))
    return _alone(study, study.control, study.aa, bar, level)


def _chosen(study: Study, name: str, asked: float | None, default: float, notes: list[str]) -> float:
    """What was asked for, else the plan's, else the default; a note where the plan said otherwise."""
    planned = study.number(name)
    if asked is None:
        return default if planned is None else planned
    if planned is not None and asked != planned:
        notes.append(f"{name} {asked:g} was chosen after the plan, which says {planned:g}")
    return asked


def stopper(arm: Arm, control: Arm, *, looks: Sequence[int], margin: float, alpha: float) -> str | None:
    """Why no more seeds of this arm are needed, or None: the group-sequential rule over the pairs that have ended.

    alpha is the arm's own share: the family's over the number of recipes.
    """
    if reason := _broke(arm):
        return f"diverged: {reason}"
    seeds = _paired(arm, control)
    if list(seeds) != [seed for seed in arm.runs if seed <= max(seeds, default=-1)]:
        return None  # the pairs are looked at in the order of their seeds
    decision = sequential.decide(
        [arm.finals[s] - control.finals[s] for s in seeds], looks=looks, margin=margin, alpha=alpha
    )
    return None if decision is None else f"{decision.verdict} {decision.reason}"


def _paired(arm: Arm, control: Arm) -> tuple[int, ...]:
    """The seeds on which both ended, and neither diverged on the way."""
    broken = {*arm.diverged, *control.diverged}
    return tuple(seed for seed in arm.finals if seed in control.finals and seed not in broken)


def _broke(arm: Arm) -> str | None:
    """Why the arm counts as diverged."""
    if not arm.diverged:
        return None
    return f"{len(arm.diverged)} of {len(arm.ended)} runs, {_seeds(arm.diverged)}: {next(iter(arm.diverged.values()))}"


def _judgements(study: Study, control: Arm, margin: float, alpha: float) -> dict[str, Judgement]:
    """A judgement for every recipe. Holm's family is all of them, those that diverged or cannot be tested with p = 1."""
    found: dict[str, Judgement] = {}
    arms, diverged = {}, {}
    looks = study.looks
    for arm in study.recipes:
        seeds = _paired(arm, control)
        if reason := _broke(arm):
            diverged[arm.name] = reason
        elif reason := _untestable(study, arm, control, stopped=bool(looks)):
            found[arm.name] = _undecided(reason, len(study.recipes))
        else:
            arms[arm.name] = [arm.finals[s] for s in seeds], [control.finals[s] for s in seeds]
    family = len(study.recipes)
    if looks:
        found |= {
            name: Judgement(verdict=Verdict.DIVERGED, reason=why, family=family) for name, why in diverged.items()
        }
        return found | {name: _sequential(*pair, looks, margin, alpha, family) for name, pair in arms.items()}
    untested = {name: judgement.reason for name, judgement in found.items()}
    return judge(arms, margin=margin, alpha=alpha, diverged=diverged | untested) | found


def _sequential(
    candidate: Sequence[float], control: Sequence[float], looks: Sequence[int], margin: float, alpha: float, family: int
) -> Judgement:
    """The first look's verdict, at the family's alpha over its size: Holm would need all arms at the same look."""
    gaps = [a - b for a, b in zip(candidate, control, strict=True)]
    decision = sequential.decide(gaps, looks=looks, margin=margin, alpha=alpha / family)
    comparison = compare(candidate, control, margin=margin, alpha=alpha)
    if decision is None:
        reason = f"{len(gaps)} of {looks[-1]} seeds have ended, and no look has decided yet"
        return replace(_undecided(reason, family), comparison=comparison)
    return Judgement(verdict=decision.verdict, reason=decision.reason, family=family, comparison=comparison)


def _alone(study: Study, control: Arm, arm: Arm, margin: float, alpha: float) -> Judgement:
    """An arm that is no candidate: A/A and the broken recipe are tested on their own."""
    looks = study.looks
    if reason := _broke(arm):
        return Judgement(verdict=Verdict.DIVERGED, reason=reason, family=1)
    if reason := _untestable(study, arm, control, stopped=bool(looks)):
        return _undecided(reason, 1)
    seeds = _paired(arm, control)
    pair = [arm.finals[s] for s in seeds], [control.finals[s] for s in seeds]
    if looks:  # by the rule that stopped it: a fixed test of as many seeds as a stop left has no fixed error rate
        return _sequential(*pair, looks, margin, alpha, 1)
    return judge({arm.name: pair}, margin=margin, alpha=alpha)[arm.name]


def _untestable(study: Study, arm: Arm, control: Arm, *, stopped: bool) -> str | None:
    """Why no verdict may be given whatever the losses are; `stopped`: seeds may have been spared by the stopping rule."""
    p = arm.trial.problem
    peak, least = float(p.get("learning_rate") or 0), float(p.get("min_learning_rate") or 0)
    if least > DECAYED * peak:
        return f"the learning rate came down to {least:g} of {peak:g} only: gaps before the end of a decay are of the moment"
    if missing := _missing(study, arm, control, stopped=stopped):
        return missing
    for side in (arm, control):
        seeds = list(side.finals)
        if found := copies(list(side.finals.values())):
            return (
                f"{side.name}, {_seeds([seeds[i] for i in found])} ended on the very same loss, "
                f"{side.finals[seeds[found[0]]]:.10g}: they are one run, which says nothing of how far seeds move it"
            )
    n = len(_paired(arm, control))
    return None if n > 1 else f"{n} pair of seeds: the noise between seeds cannot be known from fewer than 2"


def _missing(study: Study, arm: Arm, control: Arm, *, stopped: bool) -> str | None:
    """The planned seeds whose pair has no result though neither run of it diverged, as a sentence."""
    planned = study.number("seeds")
    for side in (arm, control):
        spared = {"stopped"} if stopped else set()
        lost = {
            seed: run.row.outcome
            for seed, run in side.runs.items()
            if run.final is None and not run.diverged and run.row.outcome not in spared
        }
        if lost:
            said = {"the last evaluation is missing" if outcome == "ok" else outcome for outcome in lost.values()}
            return f"{side.name} has no result for {_seeds(lost)} ({', '.join(sorted(said))})"
        if planned is not None and len(side.runs) < planned:
            return f"{side.name} has {len(side.runs)} of the {planned:g} seeds of the plan"
    only = sorted(set(arm.runs) ^ set(control.runs))
    return f"{_seeds(only)} was run in one of {arm.name} and {control.name} only: pairs need both" if only else None


def _undecided(reason: str, family: int) -> Judgement:
    return Judgement(verdict=Verdict.INCONCLUSIVE, reason=reason, family=family)


def overfitted(control: Arm, margin: float) -> str | None:
    """Why final losses prove nothing, where the control's own ends above its least by more than the margin.

    Of its mean curve over the seeds, at evaluations of as many tokens as the last: early ones of a preset may be shorter.
    """
    seeds = list(control.finals)
    at = common_steps(control, control, seeds)
    if "early_eval_tokens" in control.trial.problem:
        at = [step for step in at if step > EVALUATED_FULLY * float(control.trial.problem["steps"] or 0)]
    if len(at) < FEWEST_POINTS:
        return None
    rise = overfitting(at, np.mean([losses_at(control, seed, at) for seed in seeds], axis=0))
    if rise <= margin:
        return None
    return (
        f"bf16 overfits: its validation loss ends {rise:.2g} above its least, more than the margin {margin:g}, so that a "
        "final loss rewards fitting the training text less. Train for fewer steps, or on text that is seen once"
    )


def _void(control: Arm, aa: Finding | None, broken: Finding | None, margin: float) -> str | None:
    """Why the experiment could not have told: bf16 breaks or overfits, its noise is too large, a fault is not seen."""
    if control.diverged:
        why = next(iter(control.diverged.values()))
        return f"bf16 itself diverged on {_seeds(control.diverged)} ({why}), and the seeds that are left are a biased choice"
    if too_long := overfitted(control, margin):
        return too_long
    for finding, name in ((aa, "A/A"), (broken, "broken")):
        if finding is None:
            return f"the {name} arm is missing, without which nothing shows that a difference would be seen"
    assert aa is not None
    assert broken is not None
    if aa.seeds and all(aa.arm.finals[seed] == control.finals[seed] for seed in aa.seeds):
        return "the A/A arm ended on the control's very losses: its perturbation was lost, and it shows no noise"
    if aa.verdict is not Verdict.EQUIVALENT:
        return f"the A/A arm, bf16 against itself, is not EQUIVALENT: {aa.judgement.reason}"
    if broken.verdict not in CAUGHT:
        return f"{broken.arm.name} was not caught: {broken.judgement.reason}"
    return None


def _finding(study: Study, control: Arm, arm: Arm, judgement: Judgement) -> Finding:
    seeds = _paired(arm, control)
    c = judgement.comparison
    beside: list[Comparison | None] = []
    for ours, theirs in ((arm.natives, control.finals), (arm.trained, control.trained)):
        both = [seed for seed in seeds if seed in ours and seed in theirs]
        pair = [ours[seed] for seed in both], [theirs[seed] for seed in both]
        beside.append(compare(*pair, margin=c.margin, alpha=c.alpha) if c is not None and len(both) > 1 else None)
    return Finding(
        arm=arm,
        seeds=seeds,
        judgement=judgement,
        native=beside[0],
        trained=beside[1],
        speedup=None if c is None else _speedup(control, arm, seeds),  # survivors are a biased choice
        band=_band(control, arm, seeds),
        missing=_missing(study, arm, control, stopped=bool(study.looks)),
    )


def _speedup(control: Arm, arm: Arm, seeds: Sequence[int]) -> Speedup | None:
    at = common_steps(control, arm, seeds)
    timed = [s for s in seeds if control.runs[s].step_s and arm.runs[s].step_s]
    if not at or not timed:
        return None
    return capability_matched(
        at,
        [losses_at(control, s, at) for s in seeds],
        [arm.finals[s] for s in seeds],
        control_step_s=[control.runs[s].step_s or 0.0 for s in timed],
        candidate_step_s=[arm.runs[s].step_s or 0.0 for s in timed],
    )


def _band(control: Arm, arm: Arm, seeds: Sequence[int]) -> Band | None:
    at = common_steps(control, arm, seeds)
    if not at:
        return None
    return band(at, [losses_at(arm, s, at) for s in seeds], [losses_at(control, s, at) for s in seeds])


def common_steps(control: Arm, arm: Arm, seeds: Sequence[int]) -> list[float]:
    """The steps at which every run of both was evaluated, the first (before which nothing was learnt) to the last."""
    steps = [set(side.runs[seed].curve[0]) for side in (control, arm) for seed in seeds]
    return sorted(set.intersection(*steps)) if steps else []


def losses_at(arm: Arm, seed: int, at: Sequence[float]) -> list[float]:
    by_step = dict(zip(*arm.runs[seed].curve, strict=True))
    return [by_step[step] for step in at]


def divergence_p_value(finding: Finding, control: Arm) -> float | None:
    """Fisher's exact test that recipe and control diverge at the same rate."""
    events, runs = finding.divergences
    ended = len(control.ended)
    return rate_p_value((events, runs), (len(control.diverged), ended)) if runs and ended else None


def _seeds(which: Sequence[int] | dict[int, str]) -> str:
    listed = [str(seed) for seed in which]
    return f"seed {listed[0]}" if len(listed) == 1 else f"seeds {', '.join(listed)}"
