"""Gate two revisions: run rounds of pairs, judged at looks fixed before any ratio is seen, until every trial is decided.

DIR/gate.json, written last, marks a gate as done. If it is missing, a call with the same question continues the gate from
DIR/base and DIR/head: the gate was killed, or a revision could not be run after the first round. Any other call sets the
earlier gate aside, once both revisions have a plan: a refused call changes nothing.
"""

import contextlib
import functools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import te_bench
from te_bench.experiments.spec import Record, digest
from te_bench.experiments.store import GATE_ANSWER as ANSWER
from te_bench.experiments.store import GATE_SIDES as SIDES
from te_bench.experiments.store import Store
from te_bench.gate import checkouts, output, paired_sweep
from te_bench.gate.commands import CommandProcesses
from te_bench.gate.decision import GateVerdict
from te_bench.gate.memory_and_checks import FindingKind, GateFinding
from te_bench.gate.paired_sweep import GateProcesses, PairedPlan
from te_bench.gate.paired_trial import Unrunnable
from te_bench.gate.question import FEWEST, Question
from te_bench.gate.stored_runs import INCOMPLETE, Gate, compare, judge_at_end
from te_bench.reports.analysis.naming import count_trials, first_of
from te_bench.reports.analysis.rows import TIMED, printable
from te_bench.reports.convergence.equivalence import check_alpha
from te_bench.reports.convergence.planning import duration
from te_bench.reports.files import write_file

QUESTION, LOG = "question.json", "trials.log"
MOST_NAMED = 2  # trials named in the line that announces a round
#: Pairs at which a trial is judged; its last look is where the gate's time ends (decision.looks_until). More looks leave
#: less alpha to each; these numbers find most slow-downs. Of simulated gates of six trials, one 5 % slower, 98 % find it
#: in three minutes with pairs that vary by 3.3 %; 91 % with looks at 6, 9, 13, 18 and 25.
LOOKS = (6, 10, 16, 25, 36)


def run(question: Question, directory: Path, machine: dict[str, Any], *, say: Callable[[str], None]) -> Gate:
    """Measure both revisions in rounds until every trial is decided, the last look is reached or the budget ends.

    `exit_first`: also end at the first REGRESSION of a ratio, which later looks rarely undo, unlike other failures.

    Store each side's records in `directory`, like te-bench run. A revision that cannot be run counts as failed, after what
    the stored rounds say. Raise ValueError for unknown revisions, and for what `decide` refuses.
    """
    check_alpha(question.alpha)
    started, directory = time.monotonic(), directory.absolute()  # absolute: revisions change their working directory
    root, refs = question.repository, (question.base, question.head)
    commits = refs if root is None else tuple(checkouts.commit_of(root, ref) for ref in refs)
    asked = _identity(question, commits)
    known = _read(directory / QUESTION)
    goes_on = not (directory / ANSWER).exists() and {**known, "looks": None} == {**asked, "looks": None}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(checkouts.temporary())
        stores = [stack.enter_context(Store(directory / name, fresh=not goes_on)) for name in SIDES]
        known = known if goes_on else asked
        try:
            revisions = []
            for name, commit, store in zip(SIDES, commits, stores, strict=True):
                files = _write_files(root, commit, folder / name)
                own = question.commands is None
                revisions.append(paired_sweep.revision(name, commit, files, store, machine, of_te_bench=own))
            kind = GateProcesses if question.commands is None else CommandProcesses
            processes = kind(revisions=revisions, question=question, log=directory / LOG, say=say)
            stack.enter_context(contextlib.closing(processes))
            gate = run_rounds(question, directory, processes, known, started, say)
        except Unrunnable as error:
            _begin(directory, stores, known)
            if all(store.journal.records for store in stores):
                return _judge_stored(question, directory, commits, known, str(error))
            base, head = _names(question, commits)
            margin, alpha, findings = question.margin, question.alpha, (_failed(question, str(error)),)
            gate = Gate(baseline=base, candidate=head, margin=margin, alpha=alpha, findings=findings)
    _write(directory / ANSWER, output.to_json(gate))
    return gate


def run_rounds(
    question: Question,
    directory: Path,
    processes: GateProcesses,
    known: dict[str, Any],
    started: float,
    say: Callable[[str], None],
) -> Gate:
    commits = tuple(one.commit for one in processes.revisions)
    looks = tuple(known["looks"] or ())
    until = None if question.budget_s is None else started + question.budget_s
    number, chosen, slowest, ahead = 0, None, 0.0, "round 1: every trial"
    pairs: Counter[str] = Counter()
    gate = None
    while True:
        begin = time.monotonic()
        say(ahead)
        planned = processes.start()
        if number == 0:
            _begin(directory, [one.store for one in processes.revisions], known)
        report = functools.partial(_report_failures, say)
        paired_sweep.run_round(number, processes, _to_run(planned, chosen), report=report, until=until)
        took = time.monotonic() - begin
        if number == 0:
            say(f"  {took:.1f} s, {processes.starting_s:.1f} s of them to start")
        number += 1
        pairs.update(planned.common if chosen is None else chosen)
        if chosen:  # the first round runs every trial, and is the longest
            slowest = max(slowest, took / len(planned.parts(chosen)))
        if number == 2 and not looks:
            left = None if question.budget_s is None else question.budget_s - (time.monotonic() - started)
            looks = looks_within(LOOKS[-1] if left is None else number + int(left / slowest))
            known["looks"] = looks
            _write(directory / QUESTION, known)
        gate = _judge(question, directory, commits, looks)
        chosen = _choose_next(gate, planned, [c for c in planned.common if pairs[c] < (looks or LOOKS)[-1]])
        late = until is not None and time.monotonic() + slowest * len(planned.parts(chosen)) > until
        if late or not chosen:
            gate = judge_at_end(gate, looks=looks or LOOKS, mde=question.mde)
        answered = question.exit_first and gate.regressed
        if not chosen or late or answered or number == question.most:
            part_s = slowest or took / max(len(planned.parts(planned.common)), 1)
            spent_s = time.monotonic() - started
            notes = (*_note_pairs(gate, number, looks or LOOKS), *_note_budget(gate, planned, spent_s, part_s))
            return replace(gate, notes=(*gate.notes, *notes))
        most, left_s = (looks or LOOKS)[-1], math.inf if until is None else until - time.monotonic()
        if slowest:
            left_s = min(left_s, slowest * _parts_left(gate, planned, pairs, most))
        ahead = f"round {number + 1}, pair {min(pairs[cell] for cell in chosen) + 1} of at most {most}"
        ahead += "" if left_s == math.inf else f", at most about {duration(left_s)} left"
        ahead += f": {_describe(chosen, gate)}"


def _parts_left(gate: Gate, planned: PairedPlan, pairs: Mapping[str, int], most: int) -> int:
    """Return how often the gate runs a part of the plan yet, if every undecided trial goes on to `most` pairs."""
    parts = planned.parts(_cells_of(gate.more, gate, planned.common))
    return sum(most - min(pairs[cell] for cell in part) for part in parts)


def _begin(directory: Path, stores: Iterable[Store], known: Mapping[str, Any]) -> None:
    """Set an earlier gate's records aside, then its answer: a kill leaves no records of another question."""
    for store in stores:
        store.begin()
    (directory / ANSWER).unlink(missing_ok=True)
    _write(directory / QUESTION, known)


def _note_pairs(gate: Gate, rounds: int, looks: Sequence[int]) -> list[str]:
    """Say why the table counts fewer pairs than there were rounds."""
    if all(one.pairs == rounds for one in gate.trials.values()):
        return []
    at = " or ".join(map(str, looks))
    return [
        f"there were {rounds} rounds, but fewer pairs of some trials: a trial that may be slower is measured first and "
        f"alone, and a decided trial no more. A verdict counts the pairs up to the look that decided it, at {at} pairs"
    ]


def _note_budget(gate: Gate, planned: PairedPlan, spent_s: float, part_s: float) -> list[str]:
    """Say which --budget gives every undecided trial the pairs that it needs; part_s: seconds of one part of the plan."""
    undecided = {name: one for name, one in gate.trials.items() if one.verdict is GateVerdict.INCONCLUSIVE}
    if gate.regressed or not undecided:
        return []
    few = any(one.pairs < FEWEST for one in undecided.values())
    needed = {name: FEWEST if few else one.needed or math.inf for name, one in undecided.items()}
    for name, pairs in needed.items():
        if pairs > LOOKS[-1]:
            what = "try a quieter machine, a longer command or a wider --margin"
            return [
                f"no --budget decides {gate.plain[name]}, because a gate makes at most {LOOKS[-1]} pairs of a trial; {what}"
            ]
    more_s = part_s * sum(
        max(0, *(needed[name] - one.pairs for name, one in undecided.items() if _cells_of([name], gate, part)))
        for part in planned.parts(_cells_of(undecided, gate, planned.common))
    )
    if more_s <= 0:  # the pairs would decide most cases; each trial's reason says so
        return []
    how = f"the {FEWEST} pairs of each trial that any verdict needs" if few else "a decision in 80 % of cases"
    whole = duration(spent_s + more_s)
    return [f"{how} would take about {whole} in all: --budget {whole.replace(' ', '')}"]


def _judge_stored(
    question: Question, directory: Path, commits: tuple[str, ...], known: Mapping[str, Any], why: str
) -> Gate:
    """Return the gate of the stored rounds, with the finding that a revision cannot be run for another one."""
    looks = tuple(known["looks"] or LOOKS)
    gate = judge_at_end(_judge(question, directory, commits, looks), looks=looks, mde=question.mde)
    note = "the rounds before the failure are judged; the same command goes on with them"
    return replace(gate, findings=(*gate.findings, _failed(question, why)), notes=(*gate.notes, note))


def _failed(question: Question, why: str) -> GateFinding:
    name = question.suite if question.commands is None else "the commands"
    return GateFinding(name=name, kind=FindingKind.FAILED, code=INCOMPLETE, message=printable(why))


def _write_files(repository: Path | None, commit: str, folder: Path) -> Path:
    """Return where a revision's files are: checked out into `folder`, or the installed ones."""
    if repository is None:
        return Path(te_bench.__file__).resolve().parents[1]
    checkouts.check_out(repository, commit, folder)
    return folder


def looks_within(most: int) -> tuple[int, ...]:
    """Return the numbers of pairs at which to judge a trial that has time for `most` pairs: LOOKS below, and the last.

    `most` assumes that the trial runs alone, because it may be a suspect. A gate without time for FEWEST pairs is planned
    for that many, and ends undecided.
    """
    most = max(min(most, LOOKS[-1]), FEWEST)
    return (*(look for look in LOOKS if look < most - 1), most)


def _identity(question: Question, commits: tuple[str, ...]) -> dict[str, Any]:
    """Return what must be equal for a call to continue a gate."""
    # left out: the commits stand for these, or they change no measurement; commands are compared by their digest
    apart = ("repository", "base", "head", "mde", "limits", "commands")
    asked = {one.name: getattr(question, one.name) for one in fields(question) if one.name not in apart}
    memory = {name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "OMP_", "GLIBC_"))}
    asked |= {"memory": memory, "cache": None if question.cache is None else str(question.cache)}
    faults = {name: dict(fault) for name, fault in (question.faults or {}).items()}
    commands = None if question.commands is None else digest(asdict(question.commands))
    asked |= {"options": dict(question.options), "commits": list(commits), "faults": faults, "commands": commands}
    return {**asked, "looks": None}


def _to_run(planned: PairedPlan, chosen: Sequence[str] | None) -> dict[str, list[str]]:
    """Return the cells to run: all in the first round, also those that only the head has; later the chosen ones."""
    if chosen is None:
        return {SIDES[0]: planned.common, SIDES[1]: list(planned.trials[SIDES[1]])}
    return {name: [cell for cell in planned.common if cell in chosen] for name in SIDES}


def _judge(question: Question, directory: Path, commits: tuple[str, ...], looks: tuple[int, ...]) -> Gate:
    return compare(
        directory / SIDES[0],
        directory / SIDES[1],
        margin=question.margin,
        alpha=question.alpha,
        mde=question.mde,
        allow_environment_change=True,  # the machine is one; revisions may only describe it differently
        limits=question.limits,
        looks=looks or LOOKS,
        names=_names(question, commits),
    )


def _names(question: Question, commits: tuple[str, ...]) -> tuple[str, str]:
    refs = zip((question.base, question.head), commits, strict=True)
    base, head = (ref if commit.startswith(ref) else f"{ref} ({commit[:12]})" for ref, commit in refs)
    return base, head


def _choose_next(gate: Gate, planned: PairedPlan, cells: Sequence[str]) -> list[str]:
    """Return which of the cells to run next: those that seem slower or, without any, all undecided ones.

    The gate is asked which trials are slower, and learns it sooner this way (te_bench.gate.decision). Undecided trials that
    are measured together with a suspect cost nothing and run too.
    """
    first = _cells_of((name for name in gate.more if gate.trials[name].suspect), gate, cells)
    parts = planned.parts(_cells_of(gate.more, gate, cells))
    return [cell for part in parts if not first or not set(part).isdisjoint(first) for cell in part]


def _cells_of(names: Iterable[str], gate: Gate, cells: Iterable[str]) -> list[str]:
    chosen = {name.removesuffix(suffix) for name in names for suffix in TIMED.values()}
    return [cell for cell in cells if gate.names.get(cell) in chosen]


def _describe(cells: Sequence[str], gate: Gate) -> str:
    suspect = any(one.suspect for one in gate.trials.values())
    trials = f"{count_trials(len(cells))}{' that may be slower' if suspect else ''}"
    return f"{trials}: {first_of([gate.plain[gate.names[cell]] for cell in cells], MOST_NAMED, '; ')}"


def _report_failures(say: Callable[[str], None], records: Sequence[Record]) -> None:
    for record in records:
        if record.outcome not in ("ok", "unsupported"):
            say(f"  {record.outcome}: {record.trial.name}: {record.reason}")


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _write(path: Path, value: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(value, default=list).encode(), "--out")
