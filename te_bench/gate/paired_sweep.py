"""Run rounds of pairs of two revisions: in each round, fresh processes of both run every chosen trial once, side by side.

Round k uses seed k, so the journals of both revisions look like two runs with several seeds, and one rule judges either.
A killed round is repeated: a pair counts only if both of its records exist.
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

Report = Callable[[Sequence[Record]], None]  # called with the records of a pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """A revision: its files, the store of its records, and its environment."""

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
    """The configurations that each revision's suite plans, each as one trial."""

    title: str
    baseline: str | None
    trials: Mapping[str, Mapping[str, Mapping[str, Any]]]  # {revision's name: {Trial.cell as recorded: JSON}}
    together: Mapping[str, str] = field(
        default_factory=dict
    )  # {cell: name of the run that measures it together with other cells}

    @property
    def common(self) -> list[str]:
        """Return the configurations that both revisions have."""
        base, head = self.trials.values()
        return [cell for cell in base if cell in head]

    def parts(self, cells: Iterable[str]) -> list[list[str]]:
        """Return the cells in groups; one run measures a whole group."""
        return list(grouped(cells, lambda cell: self.together.get(cell, cell)).values())


def revision(
    name: str, commit: str, root: Path, store: Store, machine: dict[str, Any], *, of_te_bench: bool = True
) -> Revision:
    """Return the revision with the environment of its code on this machine.

    Raise Unrunnable if a revision of te-bench holds no te_bench package.
    """
    package = root / "te_bench" if of_te_bench else None
    if package and not (package / "experiments").is_dir():
        raise Unrunnable(
            f"{name}: {commit[:12]} has no te_bench package at its root, so it is no revision of te-bench; "
            "for another project give --config te-bench.toml"
        )
    try:
        found = environment.of_revision(machine, package, commit)
    except OSError as error:  # a broken link among its files
        raise Unrunnable(f"{name}: {error.filename}: {error.strerror}") from error
    return Revision(name=name, commit=commit, root=root, store=store, machine=found)


@dataclass(slots=True, kw_only=True)
class GateProcesses:
    """The processes of both revisions: one fork server for the whole gate, and fresh processes in every round.

    Pairs forked from the same two processes share an error of up to 2.5 % in their ratio, which more pairs do not reduce.
    """

    revisions: Sequence[Revision]
    question: Question
    log: Path
    say: Callable[[str], None]
    timed: list[RevisionProcess] = field(default_factory=list)
    training: list[RevisionProcess] = field(default_factory=list)  # beside the trials that are timed
    planned: PairedPlan | None = None
    starting_s: float = 0.0  # seconds in which a round waited for fresh processes
    _server: ForkServer | None = None

    def start(self) -> PairedPlan:
        """Start fresh processes and return the plans. Raise Unrunnable if a revision cannot be imported or planned."""
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
        for process, one in zip(forked, self.revisions, strict=True):  # both import at the same time
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
        """Return a record of each trial in one part; trials: {revision's name: its trials}, revisions[0] runs first."""
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
    """Run round `number` in the started processes, and store its records.

    cells: {revision's name: the configurations to run}. until: the monotonic time after which no trial begins; the first
    round always runs whole. Raise Unrunnable if a revision cannot be imported again.
    """
    planned = processes.planned
    assert planned is not None
    chosen = {n: {cell: {**planned.trials[n][cell], "seed": number} for cell in cells[n]} for n in cells}
    for one in processes.revisions:  # the first round's plan lists all trials, and so shows what a side lacks
        one.store.add_environment(one.machine)
        listed = planned.trials[one.name] if number == 0 else chosen[one.name]
        trials = [as_recorded(replace(as_known(trial), seed=number)) for trial in listed.values()]
        plan = Plan(
            suite=processes.question.suite,
            title=planned.title,
            environment=one.environment,
            trials=tuple(trial.to_json() for trial in trials),
            baseline=planned.baseline,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        one.store.add_plan(plan)
    with _train_beside(processes, chosen, report) as trained:
        order = [cell for cell in dict.fromkeys(c for found in chosen.values() for c in found) if cell not in trained]
        places = list(dict.fromkeys(cell for found in planned.trials.values() for cell in found))
        parts = planned.parts(order)
        for part in parts if number % 2 == 0 else parts[::-1]:
            if number and until is not None and time.monotonic() > until:
                break
            # By the place in the plan: the place in this round changes when the order of trials is reversed.
            head_first = (number + places.index(part[0])) % 2 == 1
            asked = {n: [found[cell] for cell in part if cell in found] for n, found in chosen.items()}
            _run_pair(processes, asked, head_first, report)


def _run_pair(
    processes: GateProcesses, trials: Mapping[str, Sequence[Mapping[str, Any]]], head_first: bool, report: Report
) -> None:
    """Run and store the trials of one part by each revision that has them, unless an interrupted round stored them."""
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
    """Train both revisions in separate processes while the block runs; yield the trained cells, which the block skips.

    Only on a CPU, where the trainings of `quick` take as long as two rounds. They disturb both revisions alike.
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
    processes.training = processes.fork()  # a second process of each revision, beside the timed one

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
    """Return whether nothing that a trial records depends on what runs beside it."""
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
            raise Unrunnable(f"{one.name}: this te-bench cannot read the revision's plan: {error!r}") from error
    last = answers[-1]
    planned = [as_known(trial) for trial in last["trials"]]
    if divided := [trial for trial in planned if world_of(trial) > 1]:
        raise ValueError(
            f"--suite {question.suite}: {divided[0].name} runs on several ranks, and a gate times one process only; "
            "exclude such trials by --only"
        )
    baseline = next((as_recorded(trial).cell for trial in planned if trial.cell == last["baseline"]), None)
    return PairedPlan(title=last["title"], baseline=baseline, trials=trials)


def _by_cell(trials: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return {Trial.cell: trial}. Raise ValueError if two trials differ only in their timing protocol."""
    found: dict[str, Mapping[str, Any]] = {}
    for trial in trials:
        known = as_known(trial)
        first = found.setdefault(as_recorded(known).cell, trial)
        if as_known(first).cell != known.cell:
            raise ValueError(f"{known.name} is planned twice, by two protocols")
    return found


def _collect_answers(processes: Sequence[RevisionProcess]) -> list[Any]:
    """Return the answers. Raise ValueError if every revision refuses the question, Unrunnable for any other failure."""
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
