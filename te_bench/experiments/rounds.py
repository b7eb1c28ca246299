"""Rounds of pairs of two revisions: in each, fresh processes of both run every trial asked for once, side by side.

Round k is seed k of the trials, so what the two sides leave in their journals is what two runs with seeds leave: a gate
reads either by the same rule. A killed round is repeated, for a pair counts only when both records of it are there.
"""

import contextlib
import fnmatch
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from te_bench.experiments import environment, pairs
from te_bench.experiments.pairs import Side, Unrunnable, known, recorded
from te_bench.experiments.spec import Record, Trial
from te_bench.experiments.store import Plan, Store

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


@contextlib.contextmanager
def _started(revisions: Sequence[Revision], settings: Settings) -> Iterator[list[Side]]:
    """The processes of a round, importing at the same time."""
    with contextlib.ExitStack() as stack:
        sides = []
        for one in revisions:
            sides.append(Side(one.name, one.root, settings.log, device=settings.device))
            stack.callback(sides[-1].close)
        for side, one in zip(sides, revisions, strict=True):
            side.started(one.root)
            side.environment = one.environment
        yield sides


def run(
    number: int,
    revisions: Sequence[Revision],
    settings: Settings,
    *,
    wanted: Callable[[Planned], Mapping[str, Sequence[str]]],
    told: Told,
    until: float | None = None,
) -> Planned:
    """Run round `number` and keep its records. wanted(planned): the cells to run on each side, by the side's name.

    until: when, on the monotonic clock, no other trial is begun; the first round is run whole.

    Raises pairs.Unrunnable when a revision cannot be imported or planned.
    """
    with _started(revisions, settings) as sides:
        planned = _planned(sides, settings)
        cells = wanted(planned)
        chosen = {n: {cell: {**planned.cells[n][cell], "seed": number} for cell in cells[n]} for n in cells}
        for one in revisions:  # the first round's plan names every cell: what the other side lacks is known by it
            listed = planned.cells[one.name] if number == 0 else chosen[one.name]
            trials = [recorded(replace(known(trial), seed=number)) for trial in listed.values()]
            one.store.add_plan(_plan(one, planned, settings, trials))
        order = list(dict.fromkeys(cell for found in chosen.values() for cell in found))
        for place, cell in enumerate(order if number % 2 == 0 else order[::-1]):
            taking = [i for i, one in enumerate(revisions) if cell in chosen[one.name]]
            taking = taking if (number + place) % 2 == 0 else taking[::-1]  # who begins
            pair = {revisions[i].name: chosen[revisions[i].name][cell] for i in taking}
            trial = known(next(iter(pair.values())))
            if all(
                (recorded(trial).id, revisions[i].environment) in revisions[i].store.journal.records for i in taking
            ):
                continue  # a round that was cut short, gone on with
            if number and until is not None and time.monotonic() > until:
                break
            done = pairs.run(
                [sides[i] for i in taking],
                pair,
                timeout_s=settings.timeout_s,
                cache=settings.cache,
                gpu=settings.gpu,
                check=number == 0,
                faults=settings.faults if fnmatch.fnmatch(trial.name, settings.faulty) else None,
            )
            for i, record in zip(taking, done, strict=True):
                revisions[i].store.add(record)
            told(done)
        return planned


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
