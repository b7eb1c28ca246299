"""What a convergence run can conclude in the time it is given: seeds from --budget, and what `plan` says of them."""

import dataclasses
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_bench.cli.options import find_gpus, resolve

if TYPE_CHECKING:
    from te_bench.experiments.spec import Experiment, Options, Record
    from te_bench.experiments.store import Journal
    from te_bench.reports.convergence.planning import Outlook, Prospect, Spread
    from te_bench.reports.convergence.study import Study


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is planned for: `chip` is a GPU's or a CPU's name, None for a GPU that is not here."""

    device: str
    chip: str | None
    slots: int  # trials that run side by side: on GPUs, `share` on each, or on their cores
    asked: str | None = None  # --gpus as it was said
    share: int = 1

    @property
    def on(self) -> str:
        """Said after a time that a run takes."""
        from te_bench.reports.convergence import planning

        return planning.on(self.device, self.slots // self.share, self.share)


@dataclass(frozen=True, kw_only=True)
class Known:
    """What earlier runs recorded, and what is planned for."""

    where: Machine
    records: "tuple[Record, ...]"  # on the chip that is planned for
    studies: "tuple[Study, ...]"
    out: "Journal | None"  # of the run itself, which may have begun
    timings: bool = False  # --timings was given
    other_chips: str | None = None  # what the records are of, where none is of the chip that is planned for


def resolved(
    suite: str,
    only: str | None,
    wanted: "Options",
    *,
    out: Path,
    timings: Path | None,
    gpus: str | None,
    fresh: bool = False,
) -> "tuple[Experiment, Known | None]":
    """The experiment, its seeds as many as --budget holds, and what earlier runs recorded: for suites that give a verdict.

    Other suites are resolved as they are asked for. A run that has begun in --out keeps the seeds that it began with.
    Raises ValueError for a budget that is too small for 2 seeds or for the --seeds that were asked for, and for arms that
    no record says the time of.
    """
    budget = wanted.budget_s is not None
    of_one = dataclasses.replace(wanted, budget_s=None, seeds=1, stop_early=None)
    one = resolve(suite, None, of_one) if budget else resolve(suite, only, wanted)
    if not one.judgement:
        if timings is not None:
            raise ValueError(f"--timings: the suite {suite} gives no verdict to plan for; leave it out")
        return resolve(suite, only, wanted) if budget else one, None
    earlier = _known(None if fresh else out, timings, _machine(one, wanted, gpus))
    if not budget:
        return one, earlier
    seeds = _seeds(one, wanted, earlier, out)
    return resolve(suite, only, dataclasses.replace(wanted, budget_s=None, seeds=seeds)), earlier


def at_once(experiment: "Experiment", cores: int) -> int:
    """Its trials side by side on a CPU: where a look may spare the next ones they go one after the other."""
    from te_bench.experiments import runner

    return 1 if "first_look" in experiment.judgement else runner.at_once(experiment.trials, cores)


def _machine(experiment: "Experiment", wanted: "Options", gpus: str | None) -> Machine:
    """The machine that a plan is for: GPUs that are not here may be planned for too, one or those of --gpus 0,1,2,3."""
    from te_bench.experiments import environment

    device, share = wanted.device, wanted.share or 1
    if device == "cuda" and not environment.nvidia_gpus():
        number = 1 if gpus is None or gpus == "all" else len(set(gpus.split(",")))
        return Machine(device=device, chip=None, slots=number * share, asked=gpus, share=share)
    chosen = environment.visible_gpus() if device == "cuda" and gpus is None else find_gpus(device, gpus)
    here = environment.capture(device, chosen)["identity"]
    slots = len(chosen) * share or (1 if wanted.stop_early else at_once(experiment, here["cores"]))
    return Machine(device=device, chip=_chip(here), slots=slots, asked=gpus, share=share)


def _known(out: Path | None, timings: Path | None, where: Machine) -> Known:
    """Read DIR of --timings, and --out where a run has begun. Raises ValueError for a DIR that holds no journal."""
    from te_bench.experiments.store import load, written
    from te_bench.reports.analysis.rows import from_journals
    from te_bench.reports.convergence.study import studies

    own = load(out) if out is not None and written(out) else None
    journals = {"out": own} if own else {}
    if timings is not None and (own is None or out is None or timings.resolve() != out.resolve()):
        journals["timings"] = load(timings)
    chips = {key: _chip(body.get("identity") or {}) for j in journals.values() for key, body in j.environments.items()}
    records = [record for journal in journals.values() for record in journal.records.values()]
    records = [record for record in records if record.trial.device == where.device]
    chip = where.chip or _only([chips.get(record.environment) for record in records])
    return Known(
        where=where,
        records=tuple(record for record in records if chips.get(record.environment) == chip),
        studies=tuple(study for group in from_journals(journals).groups for study in studies(group)),
        out=own,
        timings=timings is not None,
        other_chips=None
        if any(chips.get(record.environment) == chip for record in records)
        else f"its records are of {', '.join(sorted({str(c) for c in chips.values() if c})) or 'no machine'}, not {chip}",
    )


def _only(chips: Sequence[str | None]) -> str | None:
    """The GPU that all records are of. Raises ValueError where there are several and none of them is here."""
    found = sorted({chip for chip in chips if chip})
    if len(found) > 1:
        raise ValueError(
            f"--timings: its records are of {', '.join(found)}, and no GPU is here to say which is planned for"
        )
    return found[0] if found else None


def _chip(identity: Mapping[str, Any]) -> str | None:
    name = identity.get("gpu" if identity.get("device") == "cuda" else "cpu")
    return None if name is None else str(name)


def _seeds(one: "Experiment", wanted: "Options", earlier: Known, out: Path) -> int:
    from te_bench.reports.convergence import planning

    where = earlier.where
    first = begun(one, earlier.out)
    if first is not None and wanted.seeds is None:
        return first
    taken = planning.seconds(one.trials, earlier.records)
    missing = [name for name, time in taken.items() if time is None]
    if missing:
        raise ValueError(_pilot(one, wanted, where, out, missing))
    assert wanted.budget_s is not None
    seed_s = sum(time or 0.0 for time in taken.values())
    most = planning.seeds_within(wanted.budget_s, slots=where.slots, seed_s=seed_s, where=where.on)
    if wanted.seeds is not None and wanted.seeds > most:
        needed = planning.duration(wanted.seeds * seed_s / where.slots)
        raise ValueError(
            f"--seeds {wanted.seeds} take about {needed}{where.on}, and --budget is "
            f"{planning.duration(wanted.budget_s)}: give --seeds {most}, or a larger budget"
        )
    return wanted.seeds or most


def begun(one: "Experiment", journal: "Journal | None") -> int | None:
    """The seeds that this very experiment was first planned with in --out, or None."""
    from te_bench.experiments.spec import Trial

    for plan in journal.plans if journal else ():
        cells = {Trial.from_json({k: v for k, v in t.items() if k != "id"}).cell for t in plan.trials}
        if plan.suite == one.suite and one.baseline in cells and plan.judgement.get("seeds"):
            return int(str(plan.judgement["seeds"]))
    return None


def _pilot(one: "Experiment", wanted: "Options", where: Machine, out: Path, missing: Sequence[str]) -> str:
    """What to run first, where nothing says how long a seed takes."""
    from te_bench.reports.convergence import planning

    folder = f"{out}-pilot"
    words = ["te-bench", "run", one.suite, "--device", wanted.device]
    share = None if wanted.share is None else str(wanted.share)
    named = ("--gpus", where.asked), ("--model", wanted.model), ("--preset", wanted.preset), ("--share", share)
    for option, value in named:
        words += [] if value is None else [option, value]
    words += ["--fused"] if wanted.fused else []
    words += [] if wanted.recipes is None else ["--recipes", ",".join(wanted.recipes)]
    for model, data in wanted.data.items():
        words += ["--data", f"{model}={data}" if model else data]
    words += [] if wanted.cache is None else ["--cache", str(wanted.cache)]
    seeds = 1 if wanted.share is None else -(-where.slots // len(one.trials))  # as many beside each other as in the run
    words += ["--seeds", str(seeds), "--steps", str(planning.pilot_steps(one.trials[0].problem)), "--out", folder]
    arms = f"{len(missing)} of {len(one.trials)} arms, such as {missing[0]}"
    return (
        f"--budget: no record says how long a seed takes on this machine ({arms}). Run a short pilot\n"
        f"  {shlex.join(words)}\nand give the same command again with --timings {shlex.quote(folder)}"
    )


# ---- what `plan` says


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What an experiment can conclude and what it costs; `seconds` of one trial at a time, None where no record tells."""

    outlook: "Outlook | None"  # None where nothing is known of the spread
    unused: str | None  # why records that are there tell no spread
    seeds: int
    margin: float
    looks: tuple[int, ...]  # of a plan that may stop early
    seconds: float | None
    where: Machine

    def to_json(self) -> dict[str, Any]:
        elapsed = None if self.seconds is None else self.seconds / self.where.slots
        device = None if self.seconds is None else self.seconds / self.where.share
        estimate = {"device_s": device, "elapsed_s": elapsed, "at_once": self.where.slots}
        conclusion = None if self.outlook is None else {**dataclasses.asdict(self.outlook), "looks": self.looks}
        return {"conclusion": conclusion, "estimate": estimate}

    @property
    def refused(self) -> str | None:
        """Why a run of so little power is not begun unless it is asked for, or None."""
        from te_bench.reports.convergence import planning

        outlook = self.outlook
        if outlook is None or not outlook.underpowered:
            return None
        cautious = outlook.cautious
        ways = [f"--seeds {cautious.seeds_needed}"] if cautious.seeds_needed else []
        ways += [] if cautious.detectable is None else [f"--margin {cautious.detectable:.2g}"]
        largest = planning.largest_sd(outlook.seeds, outlook.margin, cautious.alpha)
        ways += (
            []
            if largest is None
            else [f"gaps that vary by {largest:.2g} (sd) or less, not {outlook.spread.gap_sd_at_most:.2g}"]
        )
        return (
            f"{outlook.seeds} seeds would show a true gap of 0 to lie within {outlook.margin:g} nat with a power of "
            f"{cautious.power or 0:.0%} only ({_source(outlook.spread)}; 80 % bound, alpha {cautious.alpha:.3g}). It takes "
            f"{', or '.join(ways)}; or add --underpowered to run it all the same"
        )

    def lines(self) -> list[str]:
        from te_bench.reports.page.tables import TERMINAL_WIDTH

        outlook = self.outlook
        said = [f"What {self.seeds} seed{'s' * (self.seeds > 1)} can conclude, margin {self.margin:g} nat:"]
        if outlook is None:
            said.append(
                "  power: not known, for no record says how far gaps of this training vary; a pilot of 5 seeds tells, given "
                "as --timings DIR"
            )
        else:
            spread = outlook.spread
            said += [
                f"  spread of a pair's gap: sd {spread.gap_sd:.2g} nat, {_source(spread)}; planned for "
                f"{spread.gap_sd_at_most:.2g}, which it does not exceed with 80 % confidence",
                f"  one recipe on its own (alpha {outlook.alone.alpha:g}): {_said(outlook.alone)}",
            ]
            step = f"Holm's hardest step over {outlook.recipes} recipes (alpha {outlook.hardest.alpha:.3g})"
            said += [f"  {step}: {_said(outlook.hardest)}"] if outlook.recipes > 1 else []
            said.append(f"  the same by the spread that is planned for: {_said(outlook.cautious)}")
        said += [f"  --timings tells nothing of the spread: {self.unused}"] if self.unused else []
        if self.looks:
            at = ", ".join(map(str, self.looks))
            said.append(f"  stopping early: looks at {at} seeds, each recipe at its share of alpha over all")
        said.append(f"  time: {self._time()}")
        wrapped = (textwrap.wrap(line, TERMINAL_WIDTH, subsequent_indent="    ") for line in said)
        return [line for lines in wrapped for line in lines]

    def _time(self) -> str:
        from te_bench.reports.convergence import planning

        if self.seconds is None:
            return "not known; --timings DIR of a pilot would tell"
        where = self.where
        elapsed = f", {planning.duration(self.seconds / where.slots)}{where.on}" if where.slots > 1 else ""
        most, minutes = "at most" if self.looks else "about", self.seconds / where.share / 60
        return f"{most} {minutes:.3g} {'GPU' if where.device == 'cuda' else 'CPU'} minutes{elapsed}"


def forecast(experiment: "Experiment", earlier: Known) -> "Forecast":
    """Power and minimum detectable gap of the experiment's seeds, and its time where the records of all arms tell it."""
    from te_bench.reports.convergence import planning
    from te_bench.reports.convergence.sequential import looks

    judgement = {key: float(str(experiment.judgement[key])) for key in ("margin", "alpha", "seeds")}
    arms = [trial.problem.get("arm") for trial in experiment.trials if trial.seed == experiment.trials[0].seed]
    control = next((t for t in experiment.trials if t.problem.get("arm") == "control"), experiment.trials[0])
    seeds, spread = int(judgement["seeds"]), planning.spread(earlier.studies, control)
    outlook = None
    if spread is not None:
        outlook = planning.outlook(
            seeds=seeds,
            margin=judgement["margin"],
            alpha=judgement["alpha"],
            recipes=arms.count("recipe"),
            spread=spread,
        )
    unused = planning.unlike(earlier.studies, control) if spread is None or spread.assumed else None
    taken = planning.seconds(experiment.trials, earlier.records).values()
    total = None if None in taken else sum(time or 0.0 for time in taken)
    first = experiment.judgement.get("first_look")
    at = looks(int(first), seeds) if isinstance(first, int) else ()
    return Forecast(
        outlook=outlook,
        unused=(unused or earlier.other_chips) if earlier.timings else None,
        seeds=seeds,
        margin=judgement["margin"],
        looks=at,
        seconds=total,
        where=earlier.where,
    )


def _source(spread: "Spread") -> str:
    if spread.assumed:
        return f"assumed: that of {spread.assumed}, {spread.pairs} seeds"
    return f"measured on {spread.pairs} seeds, pair correlation {spread.correlation:.2f}"


def _said(prospect: "Prospect") -> str:
    seeds = prospect.seeds_needed
    needed = "no number of seeds has 80 %" if seeds is None else f"80 % takes {seeds} seeds"
    if prospect.power is None:
        return f"nothing: a verdict needs 3 seeds at least; {needed}"
    power = f"{prospect.power:.0%}" if prospect.power < 0.995 else "over 99%"
    least = "" if prospect.detectable is None else f", minimum detectable gap {prospect.detectable:.2g} nat"
    return f"power {power} at a true gap of 0{least}; {needed}"
