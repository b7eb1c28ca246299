"""What a convergence run can conclude in the time it is given, said before its first step."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_bench.experiments.spec import Experiment
from te_bench.reports.convergence import planning
from te_bench.reports.convergence.earlier_runs import EarlierRuns, Machine
from te_bench.reports.convergence.planning import Outlook, Prospect, Spread


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What an experiment can conclude and what it costs; `seconds` of one trial at a time, None where no record tells."""

    outlook: Outlook | None  # None where nothing is known of the spread
    unused: str | None  # why records that are there tell no spread
    seeds: int
    margin: float
    seconds: float | None
    trial_s: Mapping[str, float | None]  # of each configuration, by Trial.cell
    machine: Machine
    fixed: str | None = None  # what was asked otherwise, and that the first plan counts

    def to_json(self) -> dict[str, Any]:
        conclusion = None if self.outlook is None else dataclasses.asdict(self.outlook)
        return {"conclusion": conclusion, "estimate": self.machine.estimate(self.seconds)}

    @property
    def refused(self) -> str | None:
        """Why a run of so little power is not begun unless it is asked for, or None."""
        outlook = self.outlook
        if outlook is None or not outlook.underpowered:
            return None
        cautious = outlook.cautious
        ways = [f"--seeds {cautious.seeds_needed}"] if cautious.seeds_needed else []
        ways += [] if cautious.detectable is None else [f"--margin {cautious.detectable:.2g}"]
        largest = planning.largest_sd(outlook.seeds, outlook.margin, cautious.alpha)
        if largest is not None:
            ways.append(f"gaps that vary by {largest:.2g} (sd) or less, not {outlook.spread.gap_sd_at_most:.2g}")
        return (
            f"{outlook.seeds} seeds would show a true gap of 0 to lie within {outlook.margin:g} nat with a power of "
            f"{cautious.power or 0:.0%} only ({_source(outlook.spread)}; 80 % bound, alpha {cautious.alpha:.3g}). It takes "
            f"{', or '.join(ways)}; or add --underpowered to run it all the same"
        )

    def sentences(self) -> list[str]:
        """What is said of it, a line each, those of details indented."""
        outlook = self.outlook
        said = [f"What {self.seeds} seed{'s' * (self.seeds > 1)} can conclude, margin {self.margin:g} nat:"]
        if outlook is None:
            said.append(
                "  power: not known, for no record says how far gaps of this training vary; a pilot tells: run the same "
                "with --seeds 5 --out DIR, then plan with --pilot DIR"
            )
        else:
            spread = outlook.spread
            said += [
                f"  spread of a pair's gap: sd {spread.gap_sd:.2g} nat, {_source(spread)}; planned for "
                f"{spread.gap_sd_at_most:.2g}, which it does not exceed with 80 % confidence",
                f"  one recipe on its own (alpha {outlook.alone.alpha:g}): {_conclusion(outlook.alone)}",
            ]
            step = f"Holm's hardest step over {outlook.recipes} recipes (alpha {outlook.hardest.alpha:.3g})"
            said += [f"  {step}: {_conclusion(outlook.hardest)}"] if outlook.recipes > 1 else []
            said.append(f"  the same by the spread that is planned for: {_conclusion(outlook.cautious)}")
        said += [f"  --pilot tells nothing of the spread: {self.unused}"] if self.unused else []
        said += [f"  {self.fixed}"] if self.fixed else []
        said.append(f"  time: {self._time()}")
        return said

    def _time(self) -> str:
        if self.seconds is None:
            return "not known; --pilot DIR of a pilot would tell"
        machine = self.machine
        elapsed = f", {planning.duration(self.seconds / machine.slots)}{machine.on}" if machine.slots > 1 else ""
        minutes = self.seconds / machine.share / 60
        return f"about {minutes:.3g} {'GPU' if machine.device == 'cuda' else 'CPU'} minutes{elapsed}"


def forecast(experiment: Experiment, earlier: EarlierRuns) -> Forecast:
    """Power and minimum detectable gap of the experiment's seeds, and its time where the records of all arms tell it."""
    judgement = {key: float(str(experiment.judgement[key])) for key in ("margin", "alpha", "seeds")}
    arms = [trial.problem.get("arm") for trial in experiment.trials if trial.seed == experiment.trials[0].seed]
    control = next((t for t in experiment.trials if t.problem.get("arm") == "control"), experiment.trials[0])
    seeds, spread = int(judgement["seeds"]), planning.spread(earlier.studies, control)
    outlook = None
    if spread is not None:
        by = {"margin": judgement["margin"], "alpha": judgement["alpha"]}
        outlook = planning.outlook(seeds=seeds, **by, recipes=arms.count("recipe"), spread=spread)
    unused = planning.unlike(earlier.studies, control) if spread is None or spread.assumed else None
    taken = planning.seconds(experiment.trials, earlier.records)
    total = None if None in taken.values() else sum(time or 0.0 for time in taken.values())
    return Forecast(
        outlook=outlook,
        unused=(unused or earlier.other_chips) if earlier.timings else None,
        seeds=seeds,
        margin=judgement["margin"],
        seconds=total,
        trial_s={trial.cell: taken[trial.name] for trial in experiment.trials},
        machine=earlier.machine,
    )


def _source(spread: Spread) -> str:
    if spread.assumed:
        return f"assumed: that of {spread.assumed}, {spread.pairs} seeds"
    return f"measured on {spread.pairs} seeds, pair correlation {spread.correlation:.2f}"


def _conclusion(prospect: Prospect) -> str:
    seeds = prospect.seeds_needed
    needed = "no number of seeds has 80 %" if seeds is None else f"80 % takes {seeds} seeds"
    if prospect.power is None:
        return f"nothing: a verdict needs 3 seeds at least; {needed}"
    power = f"{prospect.power:.0%}" if prospect.power < 0.995 else "over 99%"
    least = "" if prospect.detectable is None else f", minimum detectable gap {prospect.detectable:.2g} nat"
    return f"power {power} at a true gap of 0{least}; {needed}"
