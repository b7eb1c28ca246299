"""Read what earlier runs recorded of a training, on the machine that a run is planned for."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_bench.experiments.spec import Experiment, Record, Scalar
from te_bench.experiments.store import Journal, Plan, load, written
from te_bench.reports.analysis.rows import from_journals, trial_of
from te_bench.reports.convergence import planning
from te_bench.reports.convergence.study import Study, studies


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine to plan for; chip: the name of its GPU or CPU, None for a GPU that is neither here nor in a record."""

    device: str
    chip: str | None
    slots: int  # trials at the same time: on GPUs, `share` on each; or on CPU cores
    asked: str | None = None  # the value of --gpus
    share: int = 1
    world: int = 1  # GPUs of a trial

    @property
    def on(self) -> str:
        """The words that follow the time of a run."""
        if self.share > 1:
            number = self.slots // self.share
            return f" on {number} GPU{'s' * (number > 1)}, {self.share} at a time on each"
        if self.world > 1 and self.device == "cuda":
            return f" on {self.slots * self.world} GPUs, {self.world} for each trial"
        return f" on {self.slots} {'GPUs' if self.device == 'cuda' else 'cores'}" if self.slots > 1 else ""

    def device_s(self, seconds: float) -> float:
        """Return the seconds of all devices for so many seconds of trials that run one at a time."""
        return seconds * self.world / self.share

    def hours(self, seconds: float) -> str:
        """Return device_s in words."""
        unit, own = "GPU" if self.device == "cuda" else "CPU", self.device_s(seconds)
        return f"{own / 3600:.3g} {unit} hours" if own >= 3600 else f"{own / 60:.3g} {unit} minutes"

    def elapsed(self, seconds: float) -> str:
        """Return the time of trials that run side by side, in words to append; "" for one at a time."""
        return f", {planning.duration(seconds / self.slots)}{self.on}" if max(self.slots, self.world) > 1 else ""

    def estimate(self, seconds: float | None) -> dict[str, float | None]:
        """Return the device's and the elapsed seconds for so many seconds of trials that run one at a time."""
        if seconds is None:
            return {"device_s": None, "elapsed_s": None, "at_once": self.slots}
        return {"device_s": self.device_s(seconds), "elapsed_s": seconds / self.slots, "at_once": self.slots}


@dataclass(frozen=True, kw_only=True)
class EarlierRuns:
    """What earlier runs recorded, and the machine to plan for."""

    machine: Machine
    records: tuple[Record, ...]  # of the machine's chip
    studies: tuple[Study, ...]
    journal: Journal | None  # of the planned run, if it has begun
    timings: tuple[Path, ...] = ()  # the folders of --pilot
    other_chips: str | None = None  # a sentence with the records' chips, if none is the machine's


def read_earlier_runs(out: Path | None, timings: Sequence[Path], machine: Machine) -> EarlierRuns:
    """Read each DIR of --pilot, and --out if a run has begun there. Raises ValueError for a DIR without a journal."""
    own = load(out) if out is not None and written(out) else None
    journals = {"out": own} if own else {}
    for directory in timings:
        if own is None or out is None or directory.resolve() != out.resolve():
            journals[str(directory)] = load(directory)
            if not any(plan.judgement for plan in journals[str(directory)].plans):
                raise ValueError(f"--pilot {directory} holds no run of convergence")
    chips = {key: chip_of(one.get("identity") or {}) for j in journals.values() for key, one in j.environments.items()}
    records = [record for journal in journals.values() for record in journal.records.values()]
    records = [record for record in records if record.trial.device == machine.device]
    chip = machine.chip or _one_chip([chips.get(record.environment) for record in records])
    here = tuple(record for record in records if chips.get(record.environment) == chip)
    others = ", ".join(sorted({str(each) for each in chips.values() if each})) or "no machine"
    return EarlierRuns(
        machine=dataclasses.replace(machine, chip=chip),
        records=here,
        studies=tuple(study for group in from_journals(journals).groups for study in studies(group)),
        journal=own,
        timings=tuple(timings),
        other_chips=None if here else f"its records are of {others}, not {chip}",
    )


def _one_chip(chips: Sequence[str | None]) -> str | None:
    """Return the GPU of all records. Raises ValueError if there are several and this machine has no GPU."""
    found = sorted({chip for chip in chips if chip})
    if len(found) > 1:
        raise ValueError(
            f"--pilot: its records are of {', '.join(found)}, and this machine has no GPU to say which one to plan for"
        )
    return found[0] if found else None


def chip_of(identity: Mapping[str, Any]) -> str | None:
    name = identity.get("gpu" if identity.get("device") == "cuda" else "cpu")
    return None if name is None else str(name)


def has_begun(one: Experiment, journal: Journal | None) -> bool:
    """Return whether this experiment has begun in --out with all of its configurations."""
    begun = {trial_of(value).cell for plan in journal.plans for value in plan.trials} if journal else set()
    return bool(first_judgement(one, journal)) and begun >= {trial.cell for trial in one.trials}


def first_judgement(one: Experiment, journal: Journal | None) -> Mapping[str, Scalar]:
    """Return the judgement of this experiment's first plan in --out, which counts; {} if it has not begun."""
    plan = first_plan(one, journal)
    return {} if plan is None else plan.judgement


def family(one: Experiment, journal: Journal | None) -> set[str]:
    """Return Trial.cell of the recipes that are judged together: the experiment's, and those of its first plan."""
    first = first_plan(one, journal)
    planned = map(trial_of, first.trials) if first else one.whole.trials if one.whole else ()
    return {trial.cell for trial in (*one.trials, *planned) if trial.problem.get("arm") == "recipe"}


def first_plan(one: Experiment, journal: Journal | None, environment: str | None = None) -> Plan | None:
    """Return the first plan of this experiment, which its verdict uses; a pilot's only for a pilot that is not longer.

    environment: the id of the only environment to look at; None for all.
    """
    seeds = int(str(one.judgement["seeds"])) if one.judgement.get("pilot") else math.inf
    for plan in journal.plans if journal else ():
        planned = {trial_of(value).cell for value in plan.trials}
        counts = not plan.judgement.get("pilot") or int(str(plan.judgement.get("seeds", 0))) >= seeds
        here = environment in (None, plan.environment)
        if here and plan.suite == one.suite and one.baseline in planned and plan.judgement.get("seeds") and counts:
            return plan
    return None
