"""Forecast before the first step what a convergence run can conclude in its time."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from te_bench.experiments.spec import Experiment, Trial
from te_bench.experiments.store import Journal
from te_bench.experiments.suites.convergence import TRUNKS, best_ratio
from te_bench.models import cost
from te_bench.models.configs import configs
from te_bench.reports.analysis.naming import arm_name, judges_fewer_bits
from te_bench.reports.analysis.rows import trial_of
from te_bench.reports.convergence import planning
from te_bench.reports.convergence.design import trial_seconds
from te_bench.reports.convergence.earlier_runs import EarlierRuns, family, first_plan
from te_bench.reports.convergence.planning import Outlook, Prospect, Spread
from te_bench.reports.convergence.power import power, two_figures
from te_bench.reports.convergence.prediction import (
    GAPS,
    Option,
    Prediction,
    counted,
    measured,
    power_table,
    warn_of_half,
)
from te_bench.reports.convergence.study import scope_of

_SEEDS = (3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 65, 80, 100)  # of the table
TRUNK_BYTES = 12  # for each parameter: float32, with two moments


@dataclass(frozen=True, kw_only=True)
class Forecast(Prediction):
    """What pairs can conclude and cost; seconds: of one trial at a time, None if no record gives them."""

    outlook: Outlook | None  # None if the spread is unknown
    unused: str | None  # why existing records do not give a spread
    seeds: int
    runs: int
    seconds: float | None
    broken: int  # runs of the planted fault, included in `runs`; broken_s: their seconds
    broken_s: float | None
    faults: int  # the number of seeds with a planted fault, if there are so many
    scope: str | None = None  # of branches: the part of training that they judge
    trunk_bytes: int | None = None  # of a branch's trunk on disk; None if unknown
    primary: str | None = None  # name of the recipe that is judged before the others
    others: int = 0  # the number of recipes of the experiment that are judged after it

    @property
    def known(self) -> bool:
        return self.outlook is not None

    @property
    def least(self) -> int:
        pilot = 0 if self.outlook is None or self.outlook.spread.assumed else planning.FEWEST_AFTER_PILOT
        return max(self._fewest, pilot)

    def to_json(self) -> dict[str, Any]:
        conclusion = None
        if self.outlook is not None:
            options = [] if self.pilot else [dataclasses.asdict(one) for one in self._options(self.outlook)]
            conclusion = {**dataclasses.asdict(self.outlook), "gaps": self.gaps, "options": options}
        scope = {} if self.scope is None else {"judged": f"FP8 {self.scope}"}
        first = {} if self.primary is None else {"judged_first": self.primary}
        return {"conclusion": conclusion, "estimate": self.machine.estimate(self.seconds), **first, **scope}

    @property
    def refused(self) -> str | None:
        """Why a run of so little power needs --underpowered, or None."""
        outlook = self.outlook
        if self.scope is not None and self.seeds < TRUNKS:
            what = "plan of branches" if not self.pilot else "pilot of branches"
            return f"--seeds {self.seeds}: a {what} takes {TRUNKS} trunks, one a seed; give {TRUNKS} or more"
        if self.pilot and self.seeds < planning.FEWEST_PAIRS:
            few = planning.FEWEST_PAIRS
            why = "for fewer gaps hardly show how far they vary"
            return f"--seeds {self.seeds}: a pilot of pairs takes {few} seeds, {why}; give {few} or more"
        if outlook is None or self.pilot or not outlook.underpowered:
            return None
        ways = [f"--seeds {self.needed}"] if self.needed else []
        if (least := outlook.detectable) is not None:
            sd = outlook.spread.gap_sd_at_most
            largest = two_figures(outlook.margin / least * sd, math.floor)
            ways += [f"--margin {two_figures(least, math.ceil)}"]
            ways += [f"gaps that vary by {largest} (sd) or less, not {sd:.2g}"]
        ways = ways or ["a larger --alpha"]
        return (
            f"{counted(outlook.seeds, 'seed')} would show both a recipe and A/A to be EQUIVALENT within {outlook.margin:g} "
            f"nat, at a true gap of 0, with a power of {outlook.chance(outlook.seeds):.0%} only "
            f"({_source(outlook.spread)}; 80 % bound, alpha {outlook.decisive.alpha:.3g}). It takes {', or '.join(ways)}; "
            "te-bench run begins such a run only with --underpowered"
        )

    def sentences(self) -> list[str]:
        """Return the forecast in words, one line each; details are indented."""
        outlook = self.outlook
        said = [f"What {counted(self.seeds, 'seed')} can conclude, margin {self.margin:g} nat:"]
        if self.scope is not None:
            said += self._of_branches()
        if self.pilot:
            said.append(
                "  a pilot: it measures how far losses vary, and hides the rest. Next: te-bench plan with --pilot DIR"
            )
        elif outlook is None:
            said.append(
                "  power: not known, because no record shows how far gaps of this training vary. Run a pilot first: run the "
                "same with --as-pilot --out DIR, then plan with --pilot DIR"
            )
        else:
            spread = outlook.spread
            alone, hardest, aa = (
                _conclusion(one, outlook.seeds, self._fewest) for one in (outlook.alone, outlook.hardest, outlook.aa)
            )
            said.append(
                f"  spread of a pair's gap: sd {spread.gap_sd:.2g} nat, {_source(spread)}; planned with its 80 % "
                f"upper bound, {spread.gap_sd_at_most:.2g}"
            )
            first = f"judged first, {self.primary}" if self.primary else "one recipe on its own"
            said.append(f"  {first} (alpha {outlook.alone.alpha:g}): {alone}")
            by = f"(Holm, alpha {outlook.hardest.alpha:.3g})"
            others, too = f"the hardest of the other {outlook.recipes - 1}", ""
            if self.others:
                said.append(f"  {others} {by}, which pass only where it does: {hardest}")
                too = f", and behind the bar {others} too"
            elif not self.primary and outlook.recipes > 1:
                said.append(f"  the hardest of {outlook.recipes} recipes {by}: {hardest}")
            said += [f"  A/A, without which no verdict counts: {aa}"] if outlook.aa_is_weaker else []
            said += [
                f"  chance that {'it' if self.primary else 'a recipe'} and A/A are both called EQUIVALENT{too}, where the "
                f"true gap in nat is{measured(self.gap)}:",
                *self._table(outlook),
                *warn_of_half(self.option(self.seeds), self.margin),
                *self._take(outlook),
            ]
            said += [f"  {_pool_instead(outlook)}"] if spread.correlation and outlook.recipes else []
        said += [f"  --pilot gives no spread: {self.unused}"] if self.unused else []
        fault = None if self.pilot else self.unseen_fault
        said += [f"  {one}" for one in (fault, self.fixed, self.rest) if one]
        said.append(f"  time: {self._time()}")
        return said

    def _options(self, outlook: Outlook) -> list[Option]:
        """Return the cost and power of other numbers of seeds, by the planned spread, at Holm's hardest step."""
        most = max(self.seeds, self.needed or 0)
        options = [seeds for seeds in sorted({*_SEEDS, self.seeds}) if self._fewest <= seeds <= 2 * most]
        return [self.option(seeds) for seeds in options]

    def _table(self, outlook: Outlook) -> list[str]:
        rows = self._options(outlook)
        return power_table(rows, self.machine, gaps=self.gaps, planned=self.seeds, unit="seeds")

    def _take(self, outlook: Outlook) -> list[str]:
        """Return a line that names the seeds to take, if a number has the power that a plan must have at half the margin."""
        at_half, at_0 = outlook.needed_at(GAPS[-1] * self.margin), outlook.needed
        if at_half is None or at_0 is None:
            return []
        take, fewer = max(at_half, self.least), max(at_0, self.least)
        fewer_at_0 = f", {fewer} where it is 0" if fewer != take else ""
        return [f"  take --seeds {take}: the fewest with 80 % where the true gap is half the margin{fewer_at_0}"]

    @property
    def _fewest(self) -> int:
        return planning.FEWEST_SEEDS if self.scope is None else TRUNKS

    @property
    def needed(self) -> int | None:
        """The fewest seeds with the power that a plan must have; None if no number has it, or the spread is unknown."""
        if self.outlook is None:
            return None
        return self.outlook.needed

    @property
    def takes(self) -> planning.SeedSeconds | None:
        """The time of seeds, whatever their number; None if it is unknown."""
        if self.seconds is None or self.broken_s is None:
            return None
        seed_s, fault_s = (self.seconds - self.broken_s) / self.seeds, self.broken_s / min(self.seeds, self.faults)
        return planning.SeedSeconds(seed_s=seed_s, fault_s=fault_s, faults=self.faults)

    def option(self, seeds: int) -> Option:
        outlook = self.outlook
        faults = min(seeds, self.faults) / min(self.seeds, self.faults)  # as a share of the plan's
        runs = round((self.runs - self.broken) / self.seeds * seeds + self.broken * faults)
        seconds = None if self.takes is None else self.takes.of(seeds)
        if outlook is None:
            return Option(rounds=seeds, runs=runs, seconds=seconds, power=None)
        shown = tuple(outlook.chance(seeds, gap=gap) for gap in self.gaps)
        others = None
        if self.others:  # each passes only where the first recipe and A/A do
            by, alpha = outlook.spread.gap_sd_at_most, outlook.hardest.alpha
            hardest = (power(seeds, by, self.margin, gap=gap, alpha=alpha) for gap in self.gaps)
            others = tuple(first * own for first, own in zip(shown, hardest, strict=True))
        return Option(rounds=seeds, runs=runs, seconds=seconds, power=shown, power_of_others=others)

    def _of_branches(self) -> list[str]:
        """Return lines on branches: what they are, what they prove, and what they leave on the disk."""
        megabytes = 0.0 if self.trunk_bytes is None else self.trunk_bytes / 1e6
        size = f"{megabytes / 1000:.2g} GB" if megabytes >= 1000 else f"{megabytes:.2g} MB"
        each = f", {size} each" if megabytes else ""
        return [
            f"  the verdict is of FP8 {self.scope} alone; it says nothing of FP8 before",
            f"  {self.seeds} trunks in bf16, one a seed, from whose end each configuration goes on. They stay in DIR/trunks"
            f"{each}; delete them when the verdict is there",
        ]

    def _time(self) -> str:
        if self.seconds is None:
            return "not known until you run a pilot and give its folder by --pilot DIR"
        by = f" ({self.time_from})" if self.time_from else ""
        return f"about {self.machine.hours(self.seconds)}{self.machine.elapsed(self.seconds)}{by}"


def forecast(experiment: Experiment, earlier: EarlierRuns) -> Forecast:
    """Return the power and minimum detectable gap of the experiment's seeds, and its time if records give it."""
    judgement = {key: float(str(experiment.judgement[key])) for key in ("margin", "alpha", "seeds")}
    control = next((t for t in experiment.trials if t.problem.get("arm") == "control"), experiment.trials[0])
    seeds, spread = int(judgement["seeds"]), planning.spread(earlier.studies, control)
    outlook, primary = None, _primary(experiment, earlier.journal)
    if spread is not None:
        by: dict[str, Any] = {"margin": judgement["margin"], "alpha": judgement["alpha"]}
        by |= {"recipes": len(family(experiment, earlier.journal)), "fewest": fewest_seeds(experiment)}
        outlook = planning.outlook(seeds=seeds, **by, spread=spread, primary=primary is not None)
    unused = planning.unlike(earlier.studies, control) if spread is None or spread.assumed else None
    taken, time_from = trial_seconds(experiment.trials, earlier)
    scope = scope_of(control)
    total = None if None in taken.values() else sum(time or 0.0 for time in taken.values())
    broken, recipes = (
        [trial for trial in experiment.trials if trial.problem.get("arm") == arm] for arm in ("broken", "recipe")
    )
    return Forecast(
        outlook=outlook,
        unused=(unused or earlier.other_chips) if earlier.timings else None,
        seeds=seeds,
        runs=len(experiment.trials),
        broken=len(broken),
        broken_s=None if total is None else sum(taken[trial.name] or 0.0 for trial in broken),
        faults=int(str(experiment.judgement["fault_runs"])),
        margin=judgement["margin"],
        seconds=total,
        trial_s={trial.cell: taken[trial.name] for trial in experiment.trials},
        machine=earlier.machine,
        scope=scope,
        trunk_bytes=_trunk_bytes(control) if scope else None,
        time_from=time_from,
        pilot=bool(experiment.judgement.get("pilot")),
        primary=primary,
        others=0 if primary is None else len({trial.cell for trial in recipes} - {experiment.judgement.get("primary")}),
        unseen_fault=planning.unseen_fault(experiment.trials, earlier.studies),
        gap=None if spread is None or judges_fewer_bits(experiment.trials) else spread.gap,
    )


def _primary(experiment: Experiment, journal: Journal | None) -> str | None:
    cell, first = experiment.judgement.get("primary"), first_plan(experiment, journal)
    trials = (
        map(trial_of, first.trials) if first else experiment.whole.trials if experiment.whole else experiment.trials
    )
    return next((arm_name(trial) for trial in trials if trial.cell == cell), None)


def fewest_seeds(experiment: Experiment) -> int:
    """Return the fewest seeds for a verdict."""
    branches = any(trial.problem.get("branch_at") is not None for trial in experiment.trials)
    return TRUNKS if branches else planning.FEWEST_SEEDS


def _trunk_bytes(control: Trial) -> int | None:
    """Return the bytes of a trunk; None for a user's model."""
    model, width = control.problem["model"], control.problem["padded_vocab"]
    known = configs()
    return TRUNK_BYTES * cost.parameters(known[model], int(str(width))) if model in known else None


def _pool_instead(outlook: Outlook) -> str:
    """Return a sentence that compares the runs of a bf16 pool with those of pairs, for the same standard error of a gap."""
    spread, recipes = outlook.spread, outlook.recipes
    ratio = best_ratio(recipes)
    pairs = spread.gap_sd**2 * (recipes + 2)  # runs of a seed: one for each recipe, bf16 and A/A
    times = spread.sd**2 * (1 + 1 / ratio) * (recipes + ratio) / pairs
    said = f"{times:.1f}" if times < 10 else f"{times:.0f}" if times < 100 else "over 100"  # few pairs are imprecise
    cheaper = ": --design pool" if times < 1 else ""
    return (
        f"a pool of bf16 runs takes {said} times as many runs for the same interval{cheaper}: two runs of one seed "
        f"correlate by {spread.correlation:.2f}"
    )


def _source(spread: Spread) -> str:
    if spread.assumed:
        return f"assumed: that of {spread.assumed}"
    return f"measured on {spread.pairs} seeds, pair correlation {spread.correlation:.2f}"


def _conclusion(prospect: Prospect, seeds: int, fewest: int) -> str:
    enough = prospect.seeds_needed
    needed = "no number of seeds has 80 %" if enough is None else f"80 % takes {enough} seeds"
    if prospect.power is None:
        return f"nothing: a verdict needs {fewest} seeds at least; {needed}"
    power = f"{prospect.power:.0%}" if prospect.power < 0.995 else "over 99%"
    least = (
        ""
        if prospect.detectable is None
        else f", or with {seeds} a margin of {two_figures(prospect.detectable, math.ceil)} nat"
    )
    return f"by its own test power {power} at a true gap of 0; {needed}{least}"
