"""Design a run whose recipes share a pool of bf16 runs: what it can conclude, what it costs, what would show more.

It reads only the spread of each configuration's losses about their own mean in earlier runs, such as a pilot's. A plan
chosen by a known gap would be biased, and no error rate would hold. Losses, margins and gaps are in nat.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from te_bench.experiments import estimate
from te_bench.experiments.spec import Experiment, Scalar, Trial
from te_bench.experiments.suites.convergence import BROKEN, PILOT
from te_bench.reports.analysis.naming import judges_fewer_bits
from te_bench.reports.convergence import planning, pooled, power
from te_bench.reports.convergence.earlier_runs import EarlierRuns, family
from te_bench.reports.convergence.prediction import (
    ENOUGH,
    GAPS,
    Option,
    Prediction,
    counted,
    measured,
    power_table,
    warn_of_half,
)
from te_bench.reports.convergence.skewed import FEWEST
from te_bench.reports.convergence.study import Study

FEWEST_FREEDOM = 6  # of a spread; with fewer its 80 % bound is at least 1.4 times the estimate
MOST_ROUNDS = 200
_STEPS = (4, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 65, 80, 100)  # rounds of the table


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpread:
    """The standard deviation of the final losses of one configuration's runs, and its degrees of freedom."""

    sd: float
    df: float
    assumed: str | None = None  # the source, if it is not the user's records
    gap: float | None = None  # as planning.Spread's

    @property
    def at_most(self) -> float:
        """The upper bound with 80 % confidence."""
        return power.at_most(self.sd, self.df)


#: Spreads of single runs in published records: (settings of the problem that must agree, spread).
ASSUMED: tuple[tuple[Mapping[str, Scalar], RunSpread], ...] = (
    *(
        (
            {"model": model, "steps": 2035, "batch": 48, "accumulate": 1, "learning_rate": 3e-4, "warmup": 400},
            # Of four configurations, two of them bf16, each about its mean; runs of one seed are alike (0.97), so the
            # degrees of freedom are those of the seeds.
            RunSpread(
                sd=0.0119,
                df=11,
                assumed="48 runs of twelve seeds in results/h200/convergence-gpt2",
                gap=planning.GAPS[model],
            ),
        )
        for model in ("gpt2", "llama-114m")
    ),
    (
        {
            "model": "tiny",
            "steps": 150,
            "batch": 8,
            "accumulate": None,
            "order": "once",
            "learning_rate": 1e-3,
            "warmup": 15,
        },
        RunSpread(sd=0.014, df=12, assumed="16 runs of this preset on a CPU, 2026-11-26"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Design(Prediction):
    """The plan of a pool, and its alternatives."""

    rounds: int
    ratio: int
    recipes: int
    family: int  # recipes in Holm's procedure: more if this is a part of a plan that has begun
    alpha: float
    spread: RunSpread | None
    unused: str | None  # why existing records do not give a spread
    broken: int  # runs of the planted fault
    takes: planning.SeedSeconds | None  # of rounds; the planted fault's runs are in the first rounds

    @property
    def known(self) -> bool:
        return self.spread is not None

    @property
    def least(self) -> int:
        return FEWEST

    def option(self, seeds: int) -> Option:
        runs = seeds * (self.recipes + self.ratio) + min(seeds, self.broken)
        shown = tuple(self.power(seeds, gap) for gap in self.gaps) if self.known else None
        return Option(rounds=seeds, runs=runs, seconds=self.seconds(seeds), power=shown)

    def at_half(self, seeds: int) -> float:
        return self.power(seeds, GAPS[-1] * self.margin)  # alone, because each power is simulated

    def seconds(self, rounds: int) -> float | None:
        """Return the seconds of these rounds, one run at a time."""
        return None if self.takes is None else self.takes.of(rounds)

    def power(self, rounds: int, gap: float = 0.0, margin: float | None = None) -> float:
        """Return the chance that a recipe, after Holm, and A/A are EQUIVALENT, by the planned spread; recipes' mean.

        margin: another one than the plan's.
        """
        assert self.spread is not None
        return pooled.power(
            rounds,
            self.spread.at_most,
            self.margin if margin is None else margin,
            ratio=self.ratio,
            recipes=self.family,
            gap=gap,
            alpha=self.alpha,
            draws=pooled.DRAWS // 2,
            with_aa=True,
        )

    @property
    def planned(self) -> Option:
        return self.option(self.rounds)

    @property
    def needed(self) -> int | None:
        """The rounds with a power of 80 % at a true gap of 0; None if MOST_ROUNDS have less, or the spread is unknown."""
        if self.spread is None:
            return None
        return power.fewest(self._suffice, FEWEST, MOST_ROUNDS)

    def _suffice(self, rounds: int) -> bool:
        return self.power(rounds) >= power.POWER - planning.ROUNDING

    @property
    def refused(self) -> str | None:
        """Why a run that would probably end without a verdict needs --underpowered, or None."""
        if self.pilot:
            return self._pilot_refused
        if self.alpha / self.family < pooled.LEAST_ALPHA:
            return (
                f"--alpha {self.alpha:g}: a pool's test of {self.family} recipes knows no critical values below "
                f"{self.family * pooled.LEAST_ALPHA:g}; give that or more"
            )
        if self.spread is None or self._suffice(self.rounds):
            return None
        sd, needed, ways = self.spread.at_most, self.needed, []
        if needed is not None:
            cost = self.seconds(needed)
            ways.append(f"--seeds {needed}" + (f" ({self.machine.hours(cost)})" if cost else ""))
        if self.rounds >= FEWEST:
            one = pooled.least_margin(self.rounds, self.ratio, self.alpha, power.POWER) * sd
            least = power.least_margin(lambda margin: self.power(self.rounds, margin=margin), one)
            ways.append(f"--margin {power.two_figures(least, math.ceil)}")
            largest = power.two_figures(self.margin / least * sd, math.floor)
            ways.append(f"runs that vary by {largest} (sd) or less, not {sd:.2g}")
        ways = ways or [f"{FEWEST} rounds or more"]
        return (
            f"{counted(self.rounds, 'round')} would show both a recipe and A/A to be EQUIVALENT within {self.margin:g} nat, "
            f"at a true gap of 0, with a power of {self.power(self.rounds):.0%} only, by the planned spread. It takes "
            f"{', or '.join(ways)}; te-bench run begins such a run only with --underpowered"
        )

    @property
    def _pilot_refused(self) -> str | None:
        freedom = (self.ratio - 1) * self.rounds - 1 + (1 + self.recipes) * (self.rounds - 1)
        if freedom >= FEWEST_FREEDOM:
            return None
        return (
            f"--seeds {self.rounds}: so short a pilot leaves {freedom} of the {FEWEST_FREEDOM} degrees of freedom that a "
            f"spread needs; leave --seeds out for {PILOT} rounds"
        )

    def to_json(self) -> dict[str, Any]:
        spread = None if self.spread is None else {**dataclasses.asdict(self.spread), "at_most": self.spread.at_most}
        hours = (None if o.seconds is None else self.machine.device_s(o.seconds) / 3600 for o in self.options)
        rows = [{**dataclasses.asdict(o), "gpu_h": h} for o, h in zip(self.options, hours, strict=True)]
        estimate = self.machine.estimate(self.seconds(self.rounds))
        conclusion = {
            "rounds": self.rounds,
            "bf16_runs": self.ratio * self.rounds,
            "looks": pooled.looks(self.rounds) if self.rounds >= FEWEST else (),
            "spread": spread,
            "gaps": self.gaps,
            "power": self.planned.power,
            "options": rows,
        }
        return {"conclusion": conclusion, "estimate": estimate, "refused": self.refused}

    @property
    def options(self) -> list[Option]:
        """The plan among alternatives, up to the number of rounds where the power is almost 1."""
        found = []
        for rounds in sorted({*_STEPS, self.rounds}):
            if rounds >= FEWEST:
                found.append(one := self.option(rounds))
                if one.at_half > ENOUGH and rounds >= self.rounds:
                    break
        return found

    def sentences(self) -> list[str]:
        """Return the design in words, one line each; details are indented."""
        bf16, looks = self.ratio * self.rounds, ", ".join(map(str, pooled.looks(max(self.rounds, FEWEST))))
        what = "pilot" if self.pilot else "design"
        said = [
            f"The {what}: {counted(self.rounds, 'round')}, each of one run of every recipe ({self.recipes}) and "
            f"{self.ratio} of bf16, of which one is an ulp away: {bf16} bf16 runs, {self.rounds} of a recipe, "
            f"{self.planned.runs} in all" + (" with the planted fault's" if self.broken else ""),
        ]
        if self.pilot:
            said.append("  only the spread of its losses is shown; te-bench plan with --pilot DIR then uses it")
        else:
            said.append(
                f"  looks after {looks} rounds by O'Brien-Fleming bounds, Holm over {self.family}, alpha {self.alpha:g}"
            )
        if self.spread is None and not self.pilot:
            said.append(
                "  power: not known, because no record shows how far runs of this training vary. Run a pilot first: run the "
                "same with --as-pilot --out DIR, then plan with --pilot DIR"
            )
        elif self.spread is not None:
            of = f"assumed: {self.spread.assumed}" if self.spread.assumed else f"measured, {self.spread.df:.3g} df"
            said += [
                f"  spread of single runs: sd {self.spread.sd:.2g} nat, {of}; planned with its 80 % upper bound, "
                f"{self.spread.at_most:.2g}",
                f"  chance that a recipe and A/A are both called EQUIVALENT within {self.margin:g} nat, where the true gap "
                f"of all recipes is{measured(self.gap)}:",
            ]
            said += power_table(self.options, self.machine, gaps=self.gaps, planned=self.rounds, unit="rounds")
            said += [] if self.pilot else warn_of_half(self.planned, self.margin)
        said += [f"  --pilot gives no spread: {self.unused}"] if self.unused else []
        fault = None if self.pilot else self.unseen_fault
        said += [f"  {one}" for one in (fault, self.fixed, self.rest) if one]
        by = f" ({self.time_from})" if self.time_from else ""
        seconds = self.seconds(self.rounds)
        if seconds is None:
            said.append("  time: not known until you run a pilot and give its folder by --pilot DIR")
        else:
            elapsed = planning.duration(seconds / self.machine.slots)
            longest = planning.duration(max(time or 0.0 for time in self.trial_s.values()))
            said.append(
                f"  time: at most {self.machine.hours(seconds)}, {elapsed}{self.machine.on}; {longest} a run{by}"
            )
        return said


def run_spread(studies: Iterable[Study], control: Trial) -> RunSpread | None:
    """Return the pooled spread of the study whose control is this trial, seeds aside; None if there is none.

    sd^2 is the sum of squared deviations from each configuration's own mean over their degrees of freedom. It does not
    depend on a configuration's mean.
    """
    found = []
    for study in studies:
        if study.control is None or study.control.trial.cell != control.cell:
            continue
        arms = [arm.finals for arm in study.arms if arm.kind != "broken" and not arm.diverged and len(arm.finals) > 1]
        squares = sum(float(np.var([*finals.values()])) * len(finals) for finals in arms)
        freedom = sum(len(finals) - 1 for finals in arms)
        if freedom >= FEWEST_FREEDOM and squares > 0:
            found.append(
                RunSpread(sd=math.sqrt(squares / freedom), df=_freedom(arms, freedom), gap=planning.gap_of(study))
            )
    return max(found, key=lambda spread: spread.df, default=None)


def _freedom(arms: Sequence[Mapping[int, float]], independent: int) -> float:
    """Return the degrees of freedom of the pooled spread of configurations, {seed: loss}, whose runs of one seed are alike.

    independent: those of runs that are not alike. The sums of squares of two configurations with n common seeds have a
    covariance of 2 rho^2 (n - 1) sigma^4. With rho = 0.97 and by the independent ones, the 80 % bound of a pilot (six
    recipes, 3 rounds) held in 55 % of simulations.
    """
    shared, together, apart = 0, 0.0, 0.0
    for one, other in itertools.combinations(arms, 2):
        seeds = sorted(one.keys() & other.keys())
        if len(seeds) > 1:
            (a, covariance), (_, b) = np.cov([one[seed] for seed in seeds], [other[seed] for seed in seeds]).tolist()
            n = len(seeds) - 1
            shared, together, apart = shared + n, together + n * covariance, apart + n * (a + b) / 2
    rho = max(together, 0.0) / apart if apart else 0.0
    return independent**2 / (independent + 2 * rho**2 * shared)


def design_of(experiment: Experiment, earlier: EarlierRuns) -> Design:
    """Return the design of an experiment with a pool, by what earlier runs recorded."""
    judged = {key: float(str(experiment.judgement[key])) for key in ("margin", "alpha", "seeds", "pool")}
    trials = experiment.trials
    control = next((trial for trial in trials if trial.problem.get("arm") == "control"), trials[0])
    held = control.problem
    assumed = next((one for of, one in ASSUMED if all(held.get(key) == of[key] for key in of)), None)
    spread = run_spread(earlier.studies, control)
    known = spread or assumed
    unused = None
    if spread is None and earlier.timings:
        unused = planning.unlike(earlier.studies, control) or earlier.other_chips
    ratio, kinds = int(judged["pool"]), list({trial.cell: trial for trial in reversed(trials)}.values())
    recipes = {trial.cell for trial in kinds if trial.problem.get("arm") == "recipe"}
    taken, time_from = trial_seconds(kinds, earlier)
    seconds = [(str(trial.problem["arm"]), taken[trial.name]) for trial in kinds]
    trial_s = {trial.cell: time for trial, (_, time) in zip(kinds, seconds, strict=True)}
    broken = BROKEN if any(trial.problem.get("arm") == "broken" for trial in kinds) else 0
    round_s = _total(seconds, {"control": ratio - 1, "aa": 1, "recipe": 1})
    broken_s = _total(seconds, {"broken": 1})
    return Design(
        rounds=int(judged["seeds"]),
        ratio=ratio,
        recipes=max(1, len(recipes)),
        family=max(1, len(family(experiment, earlier.journal))),
        margin=judged["margin"],
        alpha=judged["alpha"],
        spread=known,
        unused=unused,
        broken=broken,
        takes=None
        if None in (round_s, broken_s)
        else planning.SeedSeconds(seed_s=round_s or 0.0, fault_s=broken_s or 0.0, faults=broken),
        time_from=time_from,
        trial_s=trial_s,
        machine=earlier.machine,
        pilot=bool(experiment.judgement.get("pilot")),
        unseen_fault=planning.unseen_fault(trials, earlier.studies),
        gap=None if known is None or judges_fewer_bits(trials) else known.gap,
    )


def trial_seconds(trials: Sequence[Trial], earlier: EarlierRuns) -> tuple[dict[str, float | None], str | None]:
    """Return {Trial.name: seconds}, by records or else estimated, and a sentence about the estimated ones.

    For a known GPU that is no H200 or H100 nothing is estimated.
    """
    taken = planning.seconds(trials, earlier.records)
    if not estimate.holds_for(earlier.machine.chip):
        return taken, None
    new = {trial.name: estimate.seconds(trial) for trial in trials if taken[trial.name] is None}
    if not new or None in new.values():
        return taken, None
    unknown, all_ = (
        len({trial.cell for trial in some}) for some in ([trial for trial in trials if trial.name in new], trials)
    )
    of = "" if unknown == all_ else f"{unknown} of {all_} configurations "
    return taken | new, of + estimate.by([trial for trial in trials if trial.name in new])


def _total(seconds: Sequence[tuple[str, float | None]], counts: Mapping[str, int]) -> float | None:
    times = [(counts[arm], time) for arm, time in seconds if arm in counts]
    return None if any(time is None for _, time in times) else sum(n * (time or 0.0) for n, time in times)
