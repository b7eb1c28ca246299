"""Rounds of pairs of two revisions: in each, fresh processes of both run every trial asked for once, side by side.

Round k is seed k of the trials, so what the two leave in their journals is what two runs with seeds leave: a gate
reads either by the same rule. A killed round is repeated, for a pair counts only when both records of it are there.
"""

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from te_bench.experiments import environment
from te_bench.experiments.problems import world_of
from te_bench.experiments.spec import Record, Trial, matches
from te_bench.experiments.store import Plan, Store
from te_bench.gate import paired_trial
from te_bench.gate.paired_trial import ForkServer, RevisionProcess, Unrunnable, as_known, as_recorded
from te_bench.gate.question import Question
from te_bench.reports.analysis.rows import grouped

Report = Callable[[Sequence[Record]], None]  # is told of the records of a pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """A revision: its files, where its records go, and what tells its environment from the other's."""

    name: str  # "base" or "head"
    commit: str
    root: Path
    store: Store
    machine: Mapping[str, Any]

    @property
    def environment(self) -> str:
        return str(self.machine["id"])


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedPlan:
    """What each revision's suite asks for, a trial a configuration."""

    title: str
    baseline: str | None
    trials: Mapping[str, Mapping[str, Mapping[str, Any]]]  # {revision's name: {Trial.cell as recorded: JSON}}
    together: Mapping[str, str] = field(
        default_factory=dict
    )  # {cell: what measures it}, where that measures others too

    @property
    def common(self) -> list[str]:
        """The configurations that both have."""
        base, head = self.trials.values()
        return [cell for cell in base if cell in head]

    def parts(self, cells: Iterable[str]) -> list[list[str]]:
        """The cells, those side by side that are measured at once."""
        return list(grouped(cells, lambda cell: self.together.get(cell, cell)).values())


def revision(
    name: str, commit: str, root: Path, store: Store, machine: dict[str, Any], *, of_te_bench: bool = True
) -> Revision:
    """The revision with the environment of its code on this machine.

    Raises Unrunnable where there is no te_bench among the files of one of te-bench.
    """
    package = root / "te_bench" if of_te_bench else None
    if package and not (package / "experiments").is_dir():
        raise Unrunnable(
            f"{name}: {commit[:12]} has no te_bench package at its root: it is no revision of te-bench; "
            "of another project give --config te-bench.toml"
        )
    try:
        found = environment.of_revision(machine, package, commit)
    except OSError as error:  # a link to nowhere among its files
        raise Unrunnable(f"{name}: {error.filename}: {error.strerror}") from error
    return Revision(name=name, commit=commit, root=root, store=store, machine=found)


@dataclass(slots=True, kw_only=True)
class GateProcesses:
    """Those of both revisions: a fork server, from a gate's first round on, and in every round processes of its own.

    Pairs forked from the same two have a ratio of their own, up to 2.5 % from 1, which more pairs do not bring nearer.
    """

    revisions: Sequence[Revision]
    question: Question
    log: Path
    timed: list[RevisionProcess] = field(default_factory=list)
    training: list[RevisionProcess] = field(default_factory=list)  # beside the trials that are timed
    planned: PairedPlan | None = None
    starting_s: float = 0.0  # what a round waited for fresh processes
    _server: ForkServer | None = None

    def start(self) -> PairedPlan:
        """The plans, by fresh processes. Raises Unrunnable when a revision cannot be imported or planned."""
        began = time.monotonic()
        for one in self.timed:
            one.close()
        if self._server is None or self._server.process.poll() is not None:
            self.close()
            self._server = ForkServer(self.log, device=self.question.device)
        self.timed = self.fork()
        self.planned = self.planned or _ask_for_plans(self.timed, self.question)
        self.starting_s = time.monotonic() - began
        return self.planned

    def fork(self) -> list[RevisionProcess]:
        assert self._server is not None
        forked = [RevisionProcess(one.name, one.root, self._server) for one in self.revisions]
        for process, one in zip(forked, self.revisions, strict=True):  # they import at the same time
            process.wait_for_imports(one.root)
            process.environment = one.environment
        if self.planned is not None:
            for process in forked:
                trials = self.planned.trials[process.name].values()
                process.ask("load", workloads=sorted({trial["workload"] for trial in trials}))
            for process in forked:
                process.answer()
        return forked

    def measure(
        self, revisions: Sequence[Revision], trials: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> list[tuple[Revision, Record]]:
        """A record of each trial by each revision, the first of them first; {revision's name: its trials}, of one part."""
        question = self.question
        asked = {name: found[0] for name, found in trials.items() if found}
        trial = as_known(next(iter(asked.values())))
        timed = {process.name: process for process in self.timed}
        records = paired_trial.run(
            [timed[one.name] for one in revisions],
            asked,
            timeout_s=question.timeout_s,
            cache=question.cache,
            gpu=question.gpu,
            check=trial.seed == 0,
            faults=question.faults if matches(trial.name, question.faulty) else None,
        )
        return list(zip(revisions, records, strict=True))

    def close(self) -> None:
        for one in (*self.timed, *self.training):
            one.close()
        if self._server is not None:
            self._server.close()
        self.timed, self.training, self.planned, self._server = [], [], None, None


def run_round(
    number: int,
    processes: GateProcesses,
    cells: Mapping[str, Sequence[str]],
    *,
    report: Report,
    until: float | None = None,
) -> None:
    """Run round `number` by processes that have started, and keep its records.

    cells: the configurations to run, by the revision's name. until: when, on the monotonic clock, no other trial is begun;
    the first round is run whole. Raises Unrunnable when a revision cannot be imported again.
    """
    planned = processes.planned
    assert planned is not None
    chosen = {n: {cell: {**planned.trials[n][cell], "seed": number} for cell in cells[n]} for n in cells}
    for one in processes.revisions:  # the first round's plan names them all: what the other lacks is known by it
        one.store.add_environment(one.machine)
        listed = planned.trials[one.name] if number == 0 else chosen[one.name]
        trials = [as_recorded(replace(as_known(trial), seed=number)) for trial in listed.values()]
        one.store.add_plan(_plan_to_store(one, planned, processes.question, trials))
    with _train_beside(processes, chosen, report) as trained:
        order = [cell for cell in dict.fromkeys(c for found in chosen.values() for c in found) if cell not in trained]
        places = list(dict.fromkeys(cell for found in planned.trials.values() for cell in found))
        parts = planned.parts(order)
        for part in parts if number % 2 == 0 else parts[::-1]:
            if number and until is not None and time.monotonic() > until:
                break
            # Not by the place in this round, which is another by as many as there are trials when their order is reversed.
            head_first = (number + places.index(part[0])) % 2 == 1
            asked = {n: [found[cell] for cell in part if cell in found] for n, found in chosen.items()}
            _run_pair(processes, asked, head_first, report)


def _run_pair(
    processes: GateProcesses, trials: Mapping[str, Sequence[Mapping[str, Any]]], head_first: bool, report: Report
) -> None:
    """The trials of one part by each revision that has them, and their records, unless a round cut short has left them."""
    revisions = [one for one in processes.revisions if trials.get(one.name)]
    if all(_is_recorded(one, trial) for one in revisions for trial in trials[one.name]):
        return
    measured = processes.measure(revisions[::-1] if head_first else revisions, trials)
    for one, record in measured:
        one.store.add(record)
    report([record for _, record in measured])


def _is_recorded(one: Revision, trial: Mapping[str, Any]) -> bool:
    return (as_recorded(as_known(trial)).id, one.environment) in one.store.journal.records


@contextlib.contextmanager
def _train_beside(
    processes: GateProcesses, chosen: Mapping[str, Mapping[str, Mapping[str, Any]]], report: Report
) -> Iterator[set[str]]:
    """Train by both revisions, in processes of their own, while the block runs; which need not be run in it.

    On a CPU, where the trainings of `quick` would take as long as two rounds. What they disturb they disturb for both.
    """
    question = processes.question
    cells = {
        one.name: [
            cell
            for cell, trial in chosen[one.name].items()
            if _may_run_beside(as_known(trial)) and not _is_recorded(one, trial)
        ]
        for one in processes.revisions
    }
    if not any(cells.values()):
        yield set()
        return
    processes.training = processes.fork()  # a second process of each revision, while a round is run

    def train(process: RevisionProcess) -> list[Record]:
        trials = [{process.name: chosen[process.name][cell]} for cell in cells[process.name]]
        more: dict[str, Any] = {"timeout_s": question.timeout_s, "cache": question.cache, "gpu": question.gpu}
        return [record for trial in trials for record in paired_trial.run([process], trial, **more)]

    with concurrent.futures.ThreadPoolExecutor(len(processes.training)) as pool:
        try:
            training = [pool.submit(train, process) for process in processes.training]
            yield {cell for found in cells.values() for cell in found}
            for one, done in zip(processes.revisions, training, strict=True):
                for record in done.result():
                    one.store.add(record)
                    report([record])
        except BaseException:  # else the pool would wait for the trainings
            processes.close()
            raise
    for process in processes.training:
        process.close()


def _may_run_beside(trial: Trial) -> bool:
    """Whether nothing that a trial records depends on what runs beside it."""
    return trial.device == "cpu" and trial.workload == "training" and "budget_s" not in trial.problem


def _ask_for_plans(processes: Sequence[RevisionProcess], question: Question) -> PairedPlan:
    for one in processes:
        one.ask(
            "plan", suite=question.suite, only=question.only, options={**question.options, "device": question.device}
        )
    answers = _collect_answers(processes)
    trials = {}
    for one, answer in zip(processes, answers, strict=True):
        try:
            trials[one.name] = _by_cell(answer["trials"])
        except (KeyError, TypeError, ValueError) as error:
            raise Unrunnable(f"{one.name}: a plan that te-bench does not know: {error!r}") from error
    last = answers[-1]
    planned = [as_known(trial) for trial in last["trials"]]
    if divided := [trial for trial in planned if world_of(trial) > 1]:
        raise ValueError(
            f"--suite {question.suite}: {divided[0].name} is over several ranks, which a gate does not time; leave such "
            "trials out by --only"
        )
    baseline = next((as_recorded(trial).cell for trial in planned if trial.cell == last["baseline"]), None)
    return PairedPlan(title=last["title"], baseline=baseline, trials=trials)


def _by_cell(trials: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """{Trial.cell: trial}. Raises ValueError where two differ in nothing but how they were to be timed."""
    found: dict[str, Mapping[str, Any]] = {}
    for trial in trials:
        known = as_known(trial)
        first = found.setdefault(as_recorded(known).cell, trial)
        if as_known(first).cell != known.cell:
            raise ValueError(f"{known.name} is planned twice, by two protocols")
    return found


def _collect_answers(processes: Sequence[RevisionProcess]) -> list[Any]:
    """Raises ValueError for a question that every revision refuses, in the last one's words; else Unrunnable."""
    answers, refusals = [], []
    for one in processes:
        try:
            answers.append(one.answer())
        except Unrunnable as error:
            refusals.append(error)
    if len(refusals) == len(processes) and all(error.refused for error in refusals):
        raise ValueError(refusals[-1].refused)
    if refusals:
        raise refusals[0]
    return answers


def _plan_to_store(one: Revision, planned: PairedPlan, question: Question, trials: Sequence[Trial]) -> Plan:
    return Plan(
        suite=question.suite,
        title=planned.title,
        environment=one.environment,
        trials=tuple(trial.to_json() for trial in trials),
        baseline=planned.baseline,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
