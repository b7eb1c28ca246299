"""Rounds of pairs of two revisions: in each, fresh processes of both run every trial asked for once, side by side.

Round k is seed k of the trials, so what the two sides leave in their journals is what two runs with seeds leave: a gate
reads either by the same rule. A killed round is repeated, for a pair counts only when both records of it are there.
"""

import concurrent.futures
import contextlib
import fnmatch
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from te_bench.experiments import environment
from te_bench.experiments.spec import Record, Trial
from te_bench.experiments.store import Plan, Store
from te_bench.gate import paired_trial
from te_bench.gate.paired_trial import Origin, Side, Unrunnable, known, recorded

Told = Callable[[Sequence[Record]], None]  # of the records of a pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """One side of a gate: its files, where its records go, and what tells its environment from the other's."""

    name: str  # "base" or "head"
    commit: str
    root: Path
    store: Store
    machine: Mapping[str, Any]

    @property
    def environment(self) -> str:
        return str(self.machine["id"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How the trials are run; the same for both sides."""

    suite: str
    only: str | None
    options: Mapping[str, Any]  # fields of spec.Options that a revision may or may not know
    device: str
    log: Path
    timeout_s: float
    cache: Path | None = None
    gpu: str | None = None
    faults: Mapping[str, Mapping[str, Any]] | None = None  # of a self-test: {side: what to plant}
    faulty: str = "*"  # into which trials


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What each side's suite asks for, a trial a cell."""

    title: str
    baseline: str | None
    cells: Mapping[str, Mapping[str, Mapping[str, Any]]]  # {side's name: {cell as recorded: its trial's JSON}}

    @property
    def common(self) -> list[str]:
        base, head = self.cells.values()
        return [cell for cell in base if cell in head]


def revision(name: str, commit: str, root: Path, store: Store, machine: dict[str, Any]) -> Revision:
    """The revision with the environment of its code on this machine, which its store now knows.

    Raises pairs.Unrunnable where there is no te_bench among its files.
    """
    package = root / "te_bench"
    if not (package / "experiments").is_dir():
        raise Unrunnable(f"{name}: {commit[:12]} has no te_bench package at its root: it is no revision of te-bench")
    try:
        found = environment.of_revision(machine, package, commit)
    except OSError as error:  # a link to nowhere among its files
        raise Unrunnable(f"{name}: {error.filename}: {error.strerror}") from error
    store.add_environment(found)
    return Revision(name=name, commit=commit, root=root, store=store, machine=found)


@dataclass(slots=True, kw_only=True)
class Processes:
    """Those of both revisions: an origin for the whole gate, and in every round sides of its own.

    Sides that stay have ratios of their own: in A/A pairs of `quick` whose trials were forked from the same two the means of
    3 to 8 pairs lie up to 2.5 % from 0, by up to 5 standard errors (2026-11-21).
    """

    revisions: Sequence[Revision]
    settings: Settings
    sides: list[Side] = field(default_factory=list)
    others: list[Side] = field(default_factory=list)  # for trainings beside the trials that are timed
    planned: Planned | None = None
    starting_s: float = 0.0  # what a round waited for fresh sides
    _origin: Origin | None = None

    def start(self) -> Planned:
        """The plans, of fresh sides. Raises pairs.Unrunnable when a revision cannot be imported or planned."""
        began = time.monotonic()
        for side in self.sides:
            side.close()
        if self._origin is None or self._origin.process.poll() is not None:
            self.close()
            self._origin = Origin(self.settings.log, device=self.settings.device)
        self.sides = self._started()
        self.planned = self.planned or _planned(self.sides, self.settings)
        self.starting_s = time.monotonic() - began
        return self.planned

    def start_others(self) -> None:
        """A second side of each revision, while a round is run."""
        self.others = self._started()

    def _started(self) -> list[Side]:
        assert self._origin is not None
        sides = [Side(one.name, one.root, self._origin) for one in self.revisions]
        for side, one in zip(sides, self.revisions, strict=True):  # they import at the same time
            side.started(one.root)
            side.environment = one.environment
        if self.planned is not None:
            for side in sides:
                trials = self.planned.cells[side.name].values()
                side.ask("load", workloads=sorted({trial["workload"] for trial in trials}))
            for side in sides:
                side.answer()
        return sides

    def close(self) -> None:
        for side in (*self.sides, *self.others):
            side.close()
        if self._origin is not None:
            self._origin.close()
        self.sides, self.others, self.planned, self._origin = [], [], None, None


@contextlib.contextmanager
def processes(revisions: Sequence[Revision], settings: Settings) -> Iterator[Processes]:
    """The processes of a gate, gone with the block; they start with its first round."""
    found = Processes(revisions=revisions, settings=settings)
    try:
        yield found
    finally:
        found.close()


def run(
    number: int,
    processes: Processes,
    *,
    wanted: Callable[[Planned], Mapping[str, Sequence[str]]],
    told: Told,
    until: float | None = None,
) -> Planned:
    """Run round `number` and keep its records. wanted(planned): the cells to run on each side, by the side's name.

    until: when, on the monotonic clock, no other trial is begun; the first round is run whole.

    Raises pairs.Unrunnable when a revision cannot be imported or planned.
    """
    planned = processes.start()
    cells = wanted(planned)
    chosen = {n: {cell: {**planned.cells[n][cell], "seed": number} for cell in cells[n]} for n in cells}
    for one in processes.revisions:  # the first round's plan names every cell: what the other side lacks is known by it
        listed = planned.cells[one.name] if number == 0 else chosen[one.name]
        trials = [recorded(replace(known(trial), seed=number)) for trial in listed.values()]
        one.store.add_plan(_plan(one, planned, processes.settings, trials))
    with _beside(processes, chosen, told) as taken:
        order = [
            cell for cell in dict.fromkeys(cell for found in chosen.values() for cell in found) if cell not in taken
        ]
        places = list(dict.fromkeys(cell for found in planned.cells.values() for cell in found))
        for cell in order if number % 2 == 0 else order[::-1]:
            if number and until is not None and time.monotonic() > until:
                break
            # Not by the place in this round, which is another by as many as there are trials when their order is reversed.
            begins = (number + places.index(cell)) % 2
            _pair(processes, {n: found[cell] for n, found in chosen.items() if cell in found}, begins, told)
    return planned


def _pair(processes: Processes, trials: Mapping[str, Mapping[str, Any]], begins: int, told: Told) -> None:
    """One trial on each side that has it, and its records, unless a round that was cut short has left them.

    begins: 1 where the later side does.
    """
    settings = processes.settings
    trial = known(next(iter(trials.values())))
    taking = [i for i, one in enumerate(processes.revisions) if one.name in trials]
    revisions = [processes.revisions[i] for i in taking]
    if all(_has(one, trials[one.name]) for one in revisions):
        return
    done = paired_trial.run(
        [processes.sides[i] for i in (taking[::-1] if begins else taking)],
        trials,
        timeout_s=settings.timeout_s,
        cache=settings.cache,
        gpu=settings.gpu,
        check=trial.seed == 0,
        faults=settings.faults if fnmatch.fnmatch(trial.name, settings.faulty) else None,
    )
    for one, record in zip(revisions, done[::-1] if begins else done, strict=True):
        one.store.add(record)
    told(done)


def _has(one: Revision, trial: Mapping[str, Any]) -> bool:
    return (recorded(known(trial)).id, one.environment) in one.store.journal.records


@contextlib.contextmanager
def _beside(
    processes: Processes, chosen: Mapping[str, Mapping[str, Mapping[str, Any]]], told: Told
) -> Iterator[set[str]]:
    """Train on both sides, in processes of their own, while the block runs; the cells that need not be run in it.

    On a CPU, where the trainings of `quick` would take as long as two rounds. What they disturb they disturb on both sides.
    """
    settings = processes.settings
    cells = {
        one.name: [
            cell for cell, trial in chosen[one.name].items() if _may_share(known(trial)) and not _has(one, trial)
        ]
        for one in processes.revisions
    }
    if not any(cells.values()):
        yield set()
        return
    processes.start_others()

    def train(side: Side) -> list[Record]:
        of_side = [{side.name: chosen[side.name][cell]} for cell in cells[side.name]]
        more: dict[str, Any] = {"timeout_s": settings.timeout_s, "cache": settings.cache, "gpu": settings.gpu}
        return [record for trial in of_side for record in paired_trial.run([side], trial, check=True, **more)]

    with concurrent.futures.ThreadPoolExecutor(len(processes.others)) as pool:
        try:
            training = [pool.submit(train, side) for side in processes.others]
            yield {cell for found in cells.values() for cell in found}
            for one, done in zip(processes.revisions, training, strict=True):
                for record in done.result():
                    one.store.add(record)
                    told([record])
        except BaseException:  # else the pool would wait for the trainings
            processes.close()
            raise
    for side in processes.others:
        side.close()


def _may_share(trial: Trial) -> bool:
    """Whether nothing that a trial records depends on what runs beside it."""
    return trial.device == "cpu" and trial.workload == "training" and "budget_s" not in trial.problem


def _planned(sides: Sequence[Side], settings: Settings) -> Planned:
    for side in sides:
        side.ask("plan", suite=settings.suite, only=settings.only, options=dict(settings.options))
    answers = _answers(sides)
    cells = {}
    for side, answer in zip(sides, answers, strict=True):
        try:
            cells[side.name] = _cells(answer["trials"])
        except (KeyError, TypeError, ValueError) as error:
            raise Unrunnable(f"{side.name}: a plan that te-bench does not know: {error!r}") from error
    last = answers[-1]
    rungs = [known(trial) for trial in last["trials"]]
    baseline = next((recorded(trial).cell for trial in rungs if trial.cell == last["baseline"]), None)
    return Planned(title=last["title"], baseline=baseline, cells=cells)


def _cells(trials: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """A trial a cell. Raises ValueError where two cells differ in nothing but how they were to be timed."""
    found: dict[str, Mapping[str, Any]] = {}
    for trial in trials:
        cell, own = recorded(known(trial)).cell, known(trial).cell
        if cell in found and known(found[cell]).cell != own:
            raise ValueError(f"{known(trial).name} is planned twice, by two protocols")
        found.setdefault(cell, trial)
    return found


def _answers(sides: Sequence[Side]) -> list[Any]:
    """Raises ValueError for a question that every side refuses, in the last one's words; else Unrunnable for a refusal."""
    answers, refusals = [], []
    for side in sides:
        try:
            answers.append(side.answer())
        except Unrunnable as error:
            refusals.append(error)
    if len(refusals) == len(sides) and all(error.refused for error in refusals):
        raise ValueError(refusals[-1].refused)
    if refusals:
        raise refusals[0]
    return answers


def _plan(one: Revision, planned: Planned, settings: Settings, trials: Sequence[Trial]) -> Plan:
    return Plan(
        suite=settings.suite,
        title=planned.title,
        environment=one.environment,
        trials=tuple(trial.to_json() for trial in trials),
        baseline=planned.baseline,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
