"""Resolve the experiment of `run` and `plan`: its seeds from --budget, and the power of its verdict."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_bench.cli.options import find_gpus

if TYPE_CHECKING:
    from te_bench.experiments.adoption import Adoptee
    from te_bench.experiments.spec import Experiment, Options, Record, Trial
    from te_bench.experiments.store import Journal
    from te_bench.reports.convergence.design import Design
    from te_bench.reports.convergence.earlier_runs import Machine
    from te_bench.reports.convergence.forecast import Forecast
    from te_bench.reports.convergence.proposals import Proposals


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
    """Return the experiment with as many seeds as --budget holds, its forecast, and why a run of it is refused.

    Suites without a verdict are resolved as asked. A run that has begun in --out keeps its first seeds, and is refused for
    lack of power only if a configuration is new to it. The forecast holds for the seeds, margin and alpha of the judgement;
    those of a run that has begun are its first plan's. in_cluster: number of GPUs of the trials' cluster. Raise ValueError
    for --pilot of another suite, for another design than that of the run in --out, and as `seeds_of_budget` does.
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
    rest = None
    if budget:
        seeds, rest = seeds_of_budget(one, asked, earlier, out)
        one = resolve(suite, dataclasses.replace(asked, budget_s=None, seeds=seeds), only=only)
    first = first_judgement(one, earlier.journal)
    if first and ("pool" in first) != ("pool" in one.judgement):
        began, other = ("pool", "pairs") if "pool" in first else ("pairs", "pool")
        raise ValueError(
            f"--design {other}: the first plan in {out} has the design {began}, which counts; "
            f"give --design {began}, or another --out"
        )
    own = {
        key: value for key, value in one.judgement.items() if not (first and key == "primary")
    }  # the first plan may have none
    judged = dataclasses.replace(one, judgement={**own, **first})
    found = design_of(judged, earlier) if "pool" in one.judgement else forecast(judged, earlier)
    changed = [f"{key} {value}" for key, value in own.items() if first.get(key, value) != value]
    fixed = f"{' and '.join(changed)} came after this run's first plan, which counts; to change it, give another --out"
    found = dataclasses.replace(found, fixed=fixed if changed else None, rest=rest)
    return one, found, None if has_begun(one, earlier.journal) else found.refused


def proposals(
    suite: str,
    only: str | None,
    asked: "Options",
    *,
    out: Path | None,
    directory: Path,
    timings: Sequence[Path] | None,
    gpus: str | None,
) -> "Proposals | None":
    """Return the designs of a study for --budget; None where it chooses none. directory: of the run, `out` or the default.

    Raise ValueError as `resolve_with_seeds` does for --pilot.
    """
    from te_bench.experiments.plan import resolve

    if asked.budget_s is None or only is not None:
        return None
    one = resolve(suite, dataclasses.replace(asked, budget_s=None, seeds=1))
    if not one.judgement:
        return None
    from te_bench.reports.convergence.earlier_runs import read_earlier_runs
    from te_bench.reports.convergence.proposals import search

    earlier = read_earlier_runs(directory, timings or (), _machine(one, asked, gpus, None))
    return search(asked, earlier, out)


def time_of(experiment: "Experiment", directory: Path, own: "Adoptee | None") -> str:
    """Say how long the trials take one after the other: the median time of each configuration in DIR, start included.

    Those that have not run there are estimated, if they are a GPU's. own: the user's model that they train.
    """
    from te_bench.experiments import estimate
    from te_bench.reports.convergence.planning import duration

    taken = _seconds_of(_journal_of(directory).records.values())
    ran = [taken[one.cell] for one in experiment.trials if one.cell in taken]
    new = [(one, estimate.seconds(one, own)) for one in experiment.trials if one.cell not in taken]
    estimated = [(one, seconds) for one, seconds in new if seconds is not None]
    if not ran and not estimated:
        why = f"none of these trials has run in {directory}"
        return f"time: not known, because {why}; te-bench run says after each trial how long the others will take"
    number = len(ran) + len(estimated)
    of = "" if number == len(experiment.trials) else f" for {number} of them, the others having no time"
    how = [f"as long as they took in {directory}"] if ran else []
    how += (
        [f"{f'{len(estimated)} of them ' if ran else ''}{estimate.by([one for one, _ in estimated])}"]
        if estimated
        else []
    )
    total = math.fsum([*ran, *(seconds for _, seconds in estimated)])
    return f"time: about {duration(total)}{of}, one at a time, {', '.join(how)}"


def _journal_of(directory: Path) -> "Journal":
    """Return DIR's journal, empty if no run has begun there."""
    from te_bench.experiments.store import Journal, load, written

    return load(directory) if written(directory) else Journal()


def _seconds_of(records: "Iterable[Record]") -> dict[str, float]:
    """Return {configuration: median wall seconds of its trials that ended ok}."""
    taken: dict[str, list[float]] = {}
    for record in records:
        if record.outcome == "ok":
            taken.setdefault(record.trial.cell, []).append(record.wall_s)
    return {cell: statistics.median(walls) for cell, walls in taken.items()}


class Limit:
    """The time limit of --within, counted from the creation of this object.

    `known`: {configuration: seconds of a trial}, for use before any trial has ended. `left`: the trials that a run had no
    time for.
    """

    def __init__(self, within: str):
        """Parse a time such as 90s, 20min or 2h; 0s begins nothing. Raise ValueError for anything else."""
        from te_bench.experiments.run_options import seconds

        self.within, self.seconds, self.began = within, seconds(within, "--within", or_none=True), time.monotonic()
        self.known: Mapping[str, float | None] = {}
        self.left: list[Trial] = []
        self._start_s = 0.0  # seconds of te-bench's start, until it asked for the first trial
        self._records: Mapping[Any, Record] = {}

    def of_trial(self, trial: "Trial", taken: Mapping[str, float]) -> float | None:
        """Return a trial's expected seconds: by its configuration's trials, by `known`, or by the longest other trial."""
        return taken.get(trial.cell) or self.known.get(trial.cell) or max(taken.values(), default=None)

    def with_trunk(self, trial: "Trial", taken: Mapping[str, float], grown: "Collection[str | None]") -> float:
        """Return the expected seconds with those of the trunk, which the control trains, if it is missing; 0: unknown."""
        from te_bench.experiments.problems import trunk_of

        control = trunk_of(trial)
        both = [trial] if control is None or control.id in grown else [trial, control]
        return max(self.of_trial(one, taken) or 0.0 for one in both)

    def in_time(self, records: "Mapping[Any, Record]") -> "Callable[[Trial], bool]":
        """Return a function: would a trial that begins now end in time? A trial of unknown duration may begin."""
        self._start_s, self._records = time.monotonic() - self.began, records
        taken, counted = dict[str, float](), -1

        def in_time(trial: "Trial") -> bool:
            nonlocal taken, counted
            ended = sum(record.outcome == "ok" for record in records.values())
            if ended != counted:  # compute the medians once for all waiting trials
                taken, counted = _seconds_of(records.values()), ended
            left = self.began + self.seconds - time.monotonic()
            return left > 0 and (self.of_trial(trial, taken) or 0.0) <= left

        return in_time

    def how_to_go_on(self, command: str) -> str | None:
        """Return a sentence: how many trials are left, and which command runs them; the same one only if it would."""
        from te_bench.experiments import runner
        from te_bench.reports.analysis.naming import count_trials
        from te_bench.reports.convergence.planning import duration

        if not self.left:
            return None
        trials = count_trials(len(self.left))
        if not self.seconds:
            return f"{trials} left: --within {self.within} begins none; to go on, give more time or leave it out"
        left = f"{trials} would not have ended --within {self.within}"
        records = self._records.values()
        taken, grown = _seconds_of(records), runner.trunks_there(records)
        shortest = min(self.with_trunk(trial, taken, grown) for trial in self.left)
        if self._start_s + shortest <= self.seconds:
            return f"{left}: to go on: {command}"
        takes = f"the shortest takes {duration(shortest)}" if shortest else "no record says how long these take"
        least = f"with its start te-bench needs --within at least {duration(self._start_s + shortest)}"
        return f"{left}: {takes}, and {least}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sitting:
    """What a run --within a time would do; None: no record says how long its trials take."""

    seconds: float
    left: int  # trials to do
    ends: int | None  # trials that end in time
    last_s: float | None  # seconds until the last of them ends
    shortest_s: float | None  # seconds of the shortest trial to do

    def sentence(self, within: str, on: str) -> str:
        """Return the sentence; on: the place of the trials, appended after "end"."""
        from te_bench.reports.convergence.planning import duration

        if not self.left:
            return f"--within {within}: no trial is left"
        if self.ends is None:
            return f"--within {within}: no record says how long these trials take"
        if self.last_s is None:
            return (
                f"--within {within}: no trial that is left ends; the shortest takes {duration(self.shortest_s or 0.0)}"
            )
        which = (
            f"{self.ends} of the {self.left} trials that are left end" if self.left > 1 else "the one that is left ends"
        )
        return f"--within {within}: {which}{on}, the last after {duration(self.last_s)}"


def what_ends(
    experiment: "Experiment",
    directory: Path,
    found: "Forecast | Design | None",
    limit: Limit,
    environment_id: str | None,
) -> Sitting:
    """Return what a run would do in the environment; None: the one planned last in DIR."""
    from te_bench.experiments import runner
    from te_bench.experiments.problems import trunk_of

    journal = _journal_of(directory)
    limit.known = dict(found.trial_s) if found else {}
    here = environment_id or next((plan.environment for plan in reversed(journal.plans)), "")
    left = runner.to_do(experiment.trials, journal, here, retry=False)
    taken = _seconds_of(journal.records.values())
    if None in [limit.of_trial(one, taken) for one in left]:
        return Sitting(seconds=limit.seconds, left=len(left), ends=None, last_s=None, shortest_s=None)
    grown = runner.trunks_there(one for (_, where), one in journal.records.items() if where == here)
    shortest_s = min((limit.with_trunk(one, taken, grown) for one in left), default=None)
    busy, ends = [0.0] * (found.machine.slots if found else 1), 0
    for one in left:
        place, control = min(range(len(busy)), key=busy.__getitem__), trunk_of(one)
        took = limit.with_trunk(one, taken, grown)
        if busy[place] + took <= limit.seconds:
            busy[place] += took
            ends += 1
            grown |= set() if control is None else {control.id}
    last_s = max(busy) if ends else None
    return Sitting(seconds=limit.seconds, left=len(left), ends=ends, last_s=last_s, shortest_s=shortest_s)


def beforehand(experiment: "Experiment") -> str | None:
    """Say what makes the experiment long: trials that --budget does not end, or large batches tried on a CPU; or None."""
    limits = {
        t.problem["memory_limit_gib"] for t in experiment.trials if (t.workload, t.device) == ("max_batch", "cpu")
    }
    if limits:
        gib = " or ".join(f"{limit:g}" for limit in limits)
        return f"each trial tries some 20 batches of up to {gib} GiB; for a small model on two cores that takes 0.5 to 3 min"
    trains = [trial.problem for trial in experiment.trials if trial.workload == "training"]
    ended = [p["budget_s"] for p in trains if p.get("budget_s")]
    if not ended or len(ended) == len(trains):
        return None
    steps = ", ".join(sorted({f"{p['steps']:,}" for p in trains if not p.get("budget_s")}))
    others = f"the other {len(trains) - len(ended)} for {steps} steps, however long"
    return f"{len(ended)} trials train for {ended[0]:g} s each; {others}"


def trials_at_once(experiment: "Experiment", cores: int) -> int:
    """Return how many of its trials run side by side on a CPU."""
    from te_bench.experiments import runner

    return runner.at_once(experiment.trials, cores)


def by_table(experiment: "Experiment") -> tuple[str, ...]:
    """Return the operators whose backends the table of measured times chooses, for environment.capture."""
    from te_bench.kernels.attention import AUTO

    return ("gemm", "attention") if any(trial.attention == AUTO for trial in experiment.trials) else ("gemm",)


def environment_of(experiment: "Experiment", asked: "Options", gpus: str | None) -> str | None:
    """Return the id of the environment of a run; None if its GPUs are not here."""
    from te_bench.experiments import environment

    chosen = _gpus_here(asked.device, gpus)
    if chosen is None:
        return None
    by, losses = by_table(experiment), experiment.of_losses
    return str(environment.capture(asked.device, chosen, by_table=by, losses=losses)["id"])


def _gpus_here(device: str, gpus: str | None) -> list[dict[str, Any]] | None:
    """Return the GPUs to run on, [] on a CPU; None if the plan is for GPUs that are not here."""
    from te_bench.experiments import environment

    if device == "cuda" and not environment.nvidia_gpus():
        return None
    return environment.visible_gpus() if device == "cuda" and gpus is None else find_gpus(device, gpus)


def _machine(experiment: "Experiment", asked: "Options", gpus: str | None, in_cluster: int | None) -> "Machine":
    """Return the machine that a plan is for.

    GPUs that are not here may be planned for: one, as many as --gpus 0,1,2,3 names, or a cluster's.
    """
    from te_bench.experiments import environment
    from te_bench.reports.convergence.earlier_runs import Machine, chip_of

    device, share = asked.device, asked.share or 1
    chosen = _gpus_here(device, gpus)
    if chosen is None:
        number = in_cluster or (1 if gpus is None or gpus == "all" else len(set(gpus.split(","))))
        return Machine(device=device, chip=None, slots=number * share, asked=gpus, share=share)
    here = environment.capture(device, chosen)["identity"]
    slots = (in_cluster or len(chosen)) * share or trials_at_once(experiment, here["cores"])
    return Machine(device=device, chip=chip_of(here), slots=slots, asked=gpus, share=share)
