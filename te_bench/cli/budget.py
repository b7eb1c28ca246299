"""The experiment that `run` and `plan` are asked for: its seeds from --budget, and what they can conclude."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_bench.cli.options import find_gpus

if TYPE_CHECKING:
    from te_bench.experiments.spec import Experiment, Options, Record, Trial
    from te_bench.reports.convergence.design import Design
    from te_bench.reports.convergence.earlier_runs import Machine
    from te_bench.reports.convergence.forecast import Forecast


def resolve_with_seeds(
    suite: str,
    only: str | None,
    asked: "Options",
    *,
    out: Path,
    timings: Sequence[Path] | None,
    gpus: str | None,
    fresh: bool = False,
    in_cluster: int | None = None,
) -> "tuple[Experiment, Forecast | Design | None, str | None]":
    """The experiment, its seeds as many as --budget holds, what it can conclude, and why a run of it is refused.

    Suites that give no verdict are resolved as they are asked for. A run that has begun in --out keeps the seeds that it
    began with, and is not refused for its little power unless a configuration is new to it. in_cluster: how many GPUs the
    trials' cluster has. What it can conclude is said of the seeds, the margin and alpha by which it will be judged: of a run
    that has begun those that it began with. Raises ValueError for --pilot of another suite, and as `seeds_of_budget` does.
    """
    from te_bench.experiments.plan import resolve

    budget = asked.budget_s is not None
    of_one = dataclasses.replace(asked, budget_s=None, seeds=1)
    one = resolve(suite, of_one) if budget else resolve(suite, asked, only=only)
    if not one.judgement:
        if timings:
            raise ValueError(f"--pilot: the suite {suite} gives no verdict to plan for; leave it out")
        return resolve(suite, asked, only=only) if budget else one, None, None
    from te_bench.reports.convergence.budget import seeds_of_budget
    from te_bench.reports.convergence.design import design_of
    from te_bench.reports.convergence.earlier_runs import first_judgement, has_begun, read_earlier_runs
    from te_bench.reports.convergence.forecast import forecast

    earlier = read_earlier_runs(None if fresh else out, timings or (), _machine(one, asked, gpus, in_cluster))
    if budget:
        seeds = seeds_of_budget(one, asked, earlier, out)
        one = resolve(suite, dataclasses.replace(asked, budget_s=None, seeds=seeds), only=only)
    first = first_judgement(one, earlier.journal)
    judged = dataclasses.replace(one, judgement={**one.judgement, **first})
    found = design_of(judged, earlier) if "pool" in one.judgement else forecast(judged, earlier)
    changed = [f"{key} {value}" for key, value in one.judgement.items() if first.get(key, value) != value]
    fixed = f"{' and '.join(changed)} came after this run's first plan, which counts; another run takes another --out"
    found = dataclasses.replace(found, fixed=fixed if changed else None)
    return one, found, None if has_begun(one, earlier.journal) else found.refused


def time_of(experiment: "Experiment", directory: Path) -> str:
    """What its trials take, one after the other: by the median of the same configuration's in DIR, process and all."""
    from te_bench.experiments.store import load, written
    from te_bench.reports.convergence.planning import duration

    taken: dict[str, list[float]] = {}
    for record in load(directory).records.values() if written(directory) else ():
        if record.outcome == "ok":
            taken.setdefault(record.trial.cell, []).append(record.wall_s)
    known = [statistics.median(taken[one.cell]) for one in experiment.trials if one.cell in taken]
    if not known:
        why = f"none of these trials has run in {directory}"
        return f"time: not known, for {why}; te-bench run says after each trial how long the others will take"
    of = "" if len(known) == len(experiment.trials) else f" for {len(known)} of them, the others being new"
    return f"time: about {duration(math.fsum(known))}{of}, one at a time, as long as they took in {directory}"


class Limit:
    """What --within leaves time for, counted from the moment that this was made."""

    def __init__(self, seconds: float, known: Mapping[str, float | None] | None = None):
        """known: seconds of a trial by its configuration, before any has ended."""
        self.seconds, self.began, self.known = seconds, time.monotonic(), dict(known or {})

    @classmethod
    def of(cls, within: str) -> "Limit":
        """Of 90s, 20min or 2h. Raises ValueError for anything else."""
        from te_bench.experiments.run_options import seconds

        return cls(seconds(within, "--within"))

    def of_trial(self, trial: "Trial", records: "Iterable[Record]") -> float | None:
        """As long as the configuration's trials took, else as is known of it, else as long as the longest of others."""
        taken: dict[str, list[float]] = {}
        for record in records:
            if record.outcome == "ok":
                taken.setdefault(record.trial.cell, []).append(record.wall_s)
        medians = {cell: statistics.median(walls) for cell, walls in taken.items()}
        return medians.get(trial.cell) or self.known.get(trial.cell) or max(medians.values(), default=None)

    def in_time(self, records: "Mapping[Any, Record]") -> "Callable[[Trial], bool]":
        """Whether a trial that begins at this moment would end in time; one that nothing is known of may begin."""

        def in_time(trial: "Trial") -> bool:
            left = self.began + self.seconds - time.monotonic()
            return left > 0 and (self.of_trial(trial, records.values()) or 0.0) <= left

        return in_time


def what_ends(experiment: "Experiment", directory: Path, found: "Forecast | Design | None", within: str) -> str:
    """How many of the trials that are left a run --within a time would end, in a sentence."""
    from te_bench.experiments.store import load, written
    from te_bench.reports.convergence.planning import duration

    limit = Limit.of(within)
    limit.known = dict(found.trial_s) if found else {}
    records = load(directory).records if written(directory) else {}
    done = {record.trial.id for record in records.values()}
    left = [trial for trial in experiment.trials if trial.id not in done]
    seconds = {one.cell: limit.of_trial(one, records.values()) for one in left}
    unknown = f"--within {within}: no record says how long these trials take"
    if None in seconds.values():
        return unknown
    slots, on = (found.machine.slots, found.machine.on) if found else (1, ", one at a time")
    busy, ends = [0.0] * slots, 0
    for trial in left:
        place = min(range(slots), key=busy.__getitem__)
        if busy[place] + (seconds[trial.cell] or 0.0) <= limit.seconds:
            busy[place] += seconds[trial.cell] or 0.0
            ends += 1
    return f"--within {within}: {ends} of the {len(left)} trials that are left end{on}, the last after {duration(max(busy))}"


def beforehand(experiment: "Experiment") -> str | None:
    """What makes it long, in a sentence: trials that --budget does not end, or tries of large batches on a CPU; or None."""
    limits = {
        t.problem["memory_limit_gib"] for t in experiment.trials if (t.workload, t.device) == ("max_batch", "cpu")
    }
    if limits:
        gib = " or ".join(f"{limit:g}" for limit in limits)
        return (
            f"each trial tries some 20 batches of up to {gib} GiB: of a small model half a minute to 3 min on two cores"
        )
    trains = [trial.problem for trial in experiment.trials if trial.workload == "training"]
    ended = [p["budget_s"] for p in trains if p.get("budget_s")]
    if not ended or len(ended) == len(trains):
        return None
    steps = ", ".join(sorted({f"{p['steps']:,}" for p in trains if not p.get("budget_s")}))
    others = f"the other {len(trains) - len(ended)} for {steps} steps, however long"
    return f"{len(ended)} trials train for {ended[0]:g} s each; {others}"


def trials_at_once(experiment: "Experiment", cores: int) -> int:
    """Its trials side by side on a CPU."""
    from te_bench.experiments import runner

    return runner.at_once(experiment.trials, cores)


def _machine(experiment: "Experiment", asked: "Options", gpus: str | None, in_cluster: int | None) -> "Machine":
    """The machine that a plan is for: GPUs that are not here may be planned for too, one, those of --gpus 0,1,2,3 or a
    cluster's.
    """
    from te_bench.experiments import environment
    from te_bench.reports.convergence.earlier_runs import Machine, chip_of

    device, share = asked.device, asked.share or 1
    if device == "cuda" and not environment.nvidia_gpus():
        number = in_cluster or (1 if gpus is None or gpus == "all" else len(set(gpus.split(","))))
        return Machine(device=device, chip=None, slots=number * share, asked=gpus, share=share)
    chosen = environment.visible_gpus() if device == "cuda" and gpus is None else find_gpus(device, gpus)
    here = environment.capture(device, chosen)["identity"]
    slots = (in_cluster or len(chosen)) * share or trials_at_once(experiment, here["cores"])
    return Machine(device=device, chip=chip_of(here), slots=slots, asked=gpus, share=share)
