"""Compute before the first step what a convergence run can conclude and costs: power, minimum detectable gap, GPU time.

Spread and seconds come from records of earlier runs, a pilot's or the run's own. Losses, margins and gaps are in nat.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from te_bench.experiments.estimate import steps_of
from te_bench.experiments.spec import Record, Scalar, Trial
from te_bench.reports.analysis.measures import median, numbers, step_seconds
from te_bench.reports.convergence import power
from te_bench.reports.convergence.study import Study

FEWEST_PAIRS = 3  # with 2, the standard deviation is wrong by a factor of 2 or more in two cases of five
FEWEST_SEEDS = 3  # two pairs allow no claim, because they do not show how skewed gaps are
ROUNDING = 0.005  # tolerance of a simulated power
FEWEST_AFTER_PILOT = 8  # of a plan that a pilot's spread chooses (docs/convergence-statistics.md)
#: The gaps in nat that were measured after 100 M tokens, of the recipe that is judged first; None: no run is published.
GAPS: Mapping[str, float | None] = {"gpt2": 0.0035, "llama-114m": None}
SHARE = 0.0019  # the gap of GPT-2 as a share of bf16's loss, 1.82 (results/h200/convergence-gpt2)
PILOT_STEPS = 30  # three reads of the loss: the first starts the clock, the others give the time of steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The spread of final losses between seeds of one arm, and the correlation of two runs of a seed."""

    sd: float
    correlation: float  # 0 if only the gaps are known
    pairs: int  # number of pairs behind it
    bf16_runs: int = 1  # of a seed; a gap is to their mean
    assumed: str | None = None  # the source, if it is not the user's records
    gap: float | None = None  # that was measured in such trainings, or SHARE of their loss; None if neither is known

    @property
    def gap_sd(self) -> float:
        """The standard deviation of a pair's gap: a recipe's loss minus the mean of bf16's."""
        return self.aa_sd * math.sqrt((1 + 1 / self.bf16_runs) / 2)

    @property
    def aa_sd(self) -> float:
        """The standard deviation of A/A's gap: one run minus one other of its seed."""
        return power.gap_sd(self.sd, self.correlation)

    @property
    def gap_sd_at_most(self) -> float:
        """The upper bound of gap_sd with 80 % confidence; by the estimate itself, half of plans would have less power."""
        return power.at_most(self.gap_sd, self.pairs - 1)

    @property
    def aa_sd_at_most(self) -> float:
        """The upper bound of aa_sd with 80 % confidence."""
        return power.at_most(self.aa_sd, self.pairs - 1)


#: By 48 runs on twelve seeds, two in bf16 and two in FP8, about the sum of a seed's and a configuration's mean: a run has
#: an sd of 0.00219 (33 degrees of freedom), and its gap to the mean of two has 0.00268.
_FIRST = "a gap to two bf16 runs, by GPT-2's 48 runs of twelve seeds in results/h200/convergence-gpt2"

#: Spreads of gaps in published records: (settings of the problem that must agree, spread).
ASSUMED: tuple[tuple[Mapping[str, Scalar], Spread], ...] = (
    (
        {"model": "gpt2", "steps": 300, "batch": 12, "accumulate": 1, "learning_rate": 6e-4, "warmup": 60},
        Spread(
            sd=0.0193,
            correlation=0.86,
            pairs=8,
            assumed="four configurations of results/h200/convergence-short and -dpa, 8 seeds",
            gap=0.0058,  # the largest of the four
        ),
    ),
    *(
        (
            {"model": model, "steps": 2035, "batch": 48, "accumulate": 1, "learning_rate": 3e-4, **branch},
            Spread(
                sd=0.0118,
                correlation=1 - (0.00219 / 0.0118) ** 2,
                pairs=34,
                bf16_runs=2,
                assumed=f"{whose}{_FIRST}",
                gap=GAPS[model],
            ),
        )
        for model in ("gpt2", "llama-114m")
        for branch, whose in (({"warmup": 400}, ""), ({"branch_at": 1200}, "whole trainings: "))
    ),
    (
        {"model": "tiny", "steps": 150, "branch_at": 75, "batch": 8, "learning_rate": 1e-3, "order": None},
        Spread(
            sd=0.00012 / math.sqrt(2),
            correlation=0.0,
            pairs=6,
            assumed="FP8 from step 75 on, on a CPU, 2026-11-28, 6 seeds",
        ),
    ),
    (
        {"model": "tiny", "steps": 150, "batch": 8, "accumulate": None, "learning_rate": 1e-3, "warmup": 15},
        Spread(sd=0.0015 / math.sqrt(2), correlation=0.0, pairs=5, assumed="FP8 on a CPU, 2026-11-22, 5 seeds"),
    ),
)


#: Trainings whose records show that the planted fault ends above the margin: (model, steps, branch_at). Those of GPT-2 and
#: char are published (docs/convergence-records.md); the tiny GPT's is `experiments.suites.convergence.BROKEN_NEARER`'s.
FAULT_SEEN = (("gpt2", 300, None), ("gpt2", 2035, None), ("char", 5000, None), ("tiny", 150, None), ("tiny", 150, 75))


def unseen_fault(trials: Iterable[Trial], studies: Iterable[Study]) -> str | None:
    """Return a sentence if the plan has a planted fault whose gap no record of such a training shows, or None."""
    broken = next((trial for trial in trials if trial.problem.get("arm") == "broken"), None)
    if broken is None or tuple(map(broken.problem.get, ("model", "steps", "branch_at"))) in FAULT_SEEN:
        return None
    if any(one.broken and one.broken.ended and one.broken.trial.cell == broken.cell for one in studies):
        return None
    return (
        "planted fault: no record shows how far it ends above bf16 in this training; where it is neither INFERIOR nor "
        "DIVERGED, the verdict is void"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """What an equivalence test at one alpha can show; a field is None if a verdict needs more seeds or a larger alpha."""

    alpha: float
    power: float | None  # at a true gap of 0
    detectable: float | None  # the smallest margin with a power of 80 %
    seeds_needed: int | None  # for a power of 80 %; None if no number suffices


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What so many seeds can conclude by the upper bound of the spread.

    A plan must have a `chance` of 80 %. alone, hardest and aa are each test by itself.

    primary: one recipe is judged alone before the others; Holm's procedure is then over the others.
    """

    seeds: int
    margin: float
    recipes: int
    spread: Spread
    fewest: int  # the seeds that a verdict needs, whatever the spread
    primary: bool
    alone: Prospect  # of one recipe, by all of alpha
    hardest: Prospect  # at the hardest step of Holm's procedure
    aa: Prospect  # of A/A; unless A/A is EQUIVALENT there is no verdict

    @property
    def decisive(self) -> Prospect:
        """What a plan must be able to show: the primary recipe, or the hardest step."""
        return self.alone if self.primary else self.hardest

    def chance(self, seeds: int, *, gap: float = 0.0, margin: float | None = None) -> float:
        """Return the chance that the decisive recipe, of this true gap, and A/A are both EQUIVALENT; margin: another one.

        For normal losses b - a is independent of (a + b) / 2, so A/A's gap is independent of a recipe's. With one bf16 run
        the two correlate, and the chance is a little larger.
        """
        margin = self.margin if margin is None else margin
        recipe = power.power(seeds, self.spread.gap_sd_at_most, margin, gap=gap, alpha=self.decisive.alpha)
        return recipe * power.power(seeds, self.spread.aa_sd_at_most, margin, alpha=self.aa.alpha)

    @property
    def needed(self) -> int | None:
        """The fewest seeds with the chance that a plan must have; None if no number has it."""
        return self.needed_at(0.0)

    def needed_at(self, gap: float) -> int | None:
        """Return the same where this is the true gap."""
        return power.fewest(lambda seeds: self._suffice(seeds, gap), self.fewest, power.MOST_SEEDS)

    def _suffice(self, seeds: int, gap: float = 0.0) -> bool:
        return seeds >= self.fewest and self.chance(seeds, gap=gap) >= power.POWER - ROUNDING

    @property
    def detectable(self) -> float | None:
        """The smallest margin with the chance that a plan must have; None for 2 seeds, or too small an alpha."""
        alone = self.decisive.detectable
        return (
            None if alone is None else power.least_margin(lambda margin: self.chance(self.seeds, margin=margin), alone)
        )

    @property
    def aa_is_weaker(self) -> bool:
        """Whether A/A has less power than a recipe: A/A is compared with one bf16 run, a recipe perhaps with two."""
        return (self.aa.power or 0.0) < (self.decisive.power or 0.0)

    @property
    def underpowered(self) -> bool:
        """Whether these seeds would probably end INCONCLUSIVE, or with a void verdict."""
        return self.recipes > 0 and not self._suffice(self.seeds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The seconds of a training for each step, and beside its steps: start, check and evaluations."""

    step_s: float
    fixed_s: float

    def seconds(self, steps: int) -> float:
        return self.fixed_s + steps * self.step_s


def outlook(
    *,
    seeds: int,
    margin: float,
    alpha: float,
    recipes: int,
    spread: Spread,
    fewest: int = FEWEST_SEEDS,
    primary: bool = False,
) -> Outlook:
    """Return the power at a true gap of 0 and the minimum detectable gap of `seeds` pairs, for two one-sided tests.

    fewest: the seeds that a verdict needs, whatever the spread.
    """
    sd, family = spread.gap_sd_at_most, max(recipes - primary, 1)
    return Outlook(
        seeds=seeds,
        margin=margin,
        recipes=recipes,
        spread=spread,
        fewest=fewest,
        primary=primary,
        alone=_prospect(seeds, margin, alpha, sd, fewest),
        hardest=_prospect(seeds, margin, alpha / family, sd, fewest),
        aa=_prospect(seeds, margin, alpha, spread.aa_sd_at_most, fewest),
    )


def _prospect(seeds: int, margin: float, alpha: float, sd: float, fewest: int) -> Prospect:
    enough, needed = seeds >= fewest, power.seeds_needed(sd, margin, alpha=alpha)
    least = power.detectable(se=sd / math.sqrt(seeds), df=seeds - 1, alpha=alpha)
    return Prospect(
        alpha=alpha,
        power=power.power(seeds, sd, margin, alpha=alpha) if enough else None,
        detectable=least if enough and least is not None and math.isfinite(least) else None,
        seeds_needed=None if needed is None else max(needed, fewest),
    )


def unlike(studies: Iterable[Study], control: Trial) -> str | None:
    """Return why recorded studies do not give this control's spread, or None if there are none."""
    said = None
    for study in studies:
        if study.control is None or not study.recipes:
            said = said or "its records have no bf16 control beside a recipe"
            continue
        theirs, ours = study.control.trial, control
        differ = [
            f"{key} {theirs.problem.get(key)} there, {ours.problem.get(key)} here"
            for key in dict.fromkeys([*theirs.problem, *ours.problem])
            if theirs.problem.get(key) != ours.problem.get(key)
        ]
        differ += [f"device {theirs.device} there, {ours.device} here"] if theirs.device != ours.device else []
        if not differ and study.pool is not None:
            return "too few runs of each of its configurations have ended, or their losses do not vary"
        if not differ:
            return f"fewer than {FEWEST_PAIRS} of its pairs have ended, or their gaps do not vary"
        said = f"its training is another: {', '.join(differ[:3])}"
    return said


def spread(studies: Iterable[Study], control: Trial) -> Spread | None:
    """Return the spread of the study with most pairs whose control is this trial, seeds aside; else ASSUMED's; else None.

    sd^2 is the mean variance of the recipe's runs and of bf16's over the paired seeds, pooled over recipes. correlation is
    1 - var(gap) / ((1 + 1 / bf16_runs) sd^2), so that gap_sd is that of the measured gaps. Trainings of another length,
    batch or learning rate have another spread, and do not count.
    """
    found = [
        known
        for study in studies
        if study.control is not None and study.control.trial.cell == control.cell
        if (known := _spread(study)) is not None
    ]
    return max(found, key=lambda known: known.pairs, default=_assumed(control))


def _assumed(control: Trial) -> Spread | None:
    held = control.problem
    branch = "branch_at"  # must agree too: gaps of branches differ from those of whole trainings
    alike = (known for of, known in ASSUMED if all(held.get(key) == of.get(key) for key in (*of, branch)))
    return next(alike, None)


def branch_of(control: Trial) -> int | None:
    """Return the step from which on the spread of branches of this training is assumed; None if it is for no step."""
    steps = (of["branch_at"] for of, _ in ASSUMED if of.get("branch_at") is not None)
    tried = ((step, control.with_(branch_at=step)) for step in steps)
    return next((int(str(step)) for step, branch in tried if _assumed(branch) is not None), None)


def _spread(study: Study) -> Spread | None:
    """Return a study's spread; None for fewer than FEWEST_PAIRS, or gaps that do not vary."""
    losses, gaps, freedom, pairs, bf16_runs = 0.0, 0.0, 0, 0, 1
    for arm in study.recipes:
        finals, base, sides = arm.finals, study.base(arm), study.beside(arm)
        trunks = {seed: {one.runs[seed].trunk for one in (arm, *sides)} for seed in finals if seed in base}
        seeds = [seed for seed, different in trunks.items() if len(different) == 1]
        if len(seeds) < FEWEST_PAIRS:
            continue
        a, b, *bf16 = (np.array([of[seed] for seed in seeds]) for of in (finals, base, *(one.finals for one in sides)))
        weight, bf16_runs = len(seeds) - 1, len(bf16)
        losses += weight * float(a.var(ddof=1) + np.mean([one.var(ddof=1) for one in bf16])) / 2
        gaps += weight * float((a - b).var(ddof=1))
        freedom, pairs = freedom + weight, max(pairs, len(seeds))
    if not gaps:
        return None
    correlation = 1 - gaps / ((1 + 1 / bf16_runs) * losses)
    sd, gap = math.sqrt(losses / freedom), gap_of(study)
    return Spread(sd=sd, correlation=correlation, pairs=pairs, bf16_runs=bf16_runs, gap=gap)


def gap_of(study: Study) -> float | None:
    """Return the gap that FP8 would have if it were the same share of bf16's loss as GPT-2's; None without a bf16 run."""
    losses = [] if study.control is None else list(study.control.finals.values())
    return SHARE * fmean(losses) if losses else None


def pace(record: Record) -> Pace | None:
    """Return the pace of one training; None if it failed, or was too short to measure a step.

    An unsupported training has no steps.
    """
    if record.outcome == "unsupported":
        return Pace(step_s=0.0, fixed_s=record.wall_s)
    step_s = step_seconds(record.samples)
    if record.outcome not in ("ok", "diverged") or step_s is None:
        return None
    steps = numbers(record.samples["step"])
    taken, trunk_s = steps[-1] - steps[0] + 1, float(record.work.get("trunk", {}).get("took_s", 0.0))
    return Pace(step_s=step_s, fixed_s=max(0.0, record.wall_s - trunk_s - taken * step_s))


#: Settings of the problem that a training's time depends on, beside the number of steps.
_SIZES = (
    *("model", "batch", "block", "accumulate", "padded_vocab", "threads", "share"),
    *("blocks", "parts", "head", "optimizer", "weights", "states"),
    *("evaluate", "eval_tokens", "early_eval_tokens"),
    *("world", "parallel", "shard", "sequence_parallel", "overlap", "gather"),
)


def _work(trial: Trial) -> tuple[object, ...]:
    """Return the key of trials that cost the same; a planted fault or another seed changes no cost."""
    settings = (trial.workload, trial.device, trial.mode, trial.attention, trial.precision, trial.recipe)
    return settings + tuple(trial.problem.get(key) for key in _SIZES)


def seconds(trials: Iterable[Trial], records: Iterable[Record]) -> dict[str, float | None]:
    """Return {Trial.name: its expected seconds}, the median over records of the same work; None if there are none."""
    paces: dict[tuple[object, ...], list[Pace]] = {}
    for record in records:
        if known := pace(record):
            paces.setdefault(_work(record.trial), []).append(known)
    alike = {trial.name: (paces.get(_work(trial), ()), steps_of(trial)) for trial in trials}
    return {name: median([one.seconds(steps) for one in found if steps]) for name, (found, steps) in alike.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedSeconds:
    """The time of seeds or rounds, one trial at a time: seed_s each, and fault_s more for the first `faults`."""

    seed_s: float
    fault_s: float = 0.0
    faults: int = 0

    def of(self, seeds: int) -> float:
        return seeds * self.seed_s + min(seeds, self.faults) * self.fault_s

    def within(self, seconds: float) -> int:
        """Return the most seeds that fit into so many seconds."""
        seeds = int((seconds - self.faults * self.fault_s) / self.seed_s)
        return seeds if seeds >= self.faults else int(seconds / (self.seed_s + self.fault_s))


def pilot_steps(problem: Mapping[str, object]) -> int:
    """Return the steps of a short run with as many evaluations as the whole one, so that its time beside steps is equal."""
    steps, every = (int(str(problem[key])) for key in ("steps", "eval_every"))
    shorter = -(-PILOT_STEPS * every // steps)  # steps between the pilot's evaluations
    return min(steps, max(PILOT_STEPS, -(-shorter * steps // every)))


def duration(seconds: float) -> str:
    """Return seconds in words, rounded up, because they say how much time to allow: 48 s, 12 min, 3.4 h."""
    if seconds < 120:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 7200 else f"{math.ceil(seconds / 360) / 10:g} h"
