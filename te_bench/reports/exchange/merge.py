"""Merge journals of one sweep, whose parts were run on several machines of one kind or on several days."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from te_bench.experiments.store import Journal, Key, Line, Plan, Store, lines, load, written
from te_bench.reports.analysis.naming import count_trials, first_of
from te_bench.reports.analysis.rows import differences, identity, printable, trial_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """The result of a merge. If `mismatch` is not empty and not allowed, nothing was written."""

    mismatch: tuple[str, ...]  # how the environments differ
    notes: tuple[str, ...] = ()
    records: int = 0  # planned trials with a record
    planned: int = 0


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    journal: Journal
    lines: list[Line]
    tries: Mapping[Key, list[bytes]]  # {trial: all its lines}

    @classmethod
    def read(cls, directory: Path) -> Self:
        found, tries = lines(directory), dict[Key, list[bytes]]()
        for line in found:
            if line.key is not None:
                tries.setdefault(line.key, []).append(line.raw)
        return cls(printable(str(directory)), load(directory), found, tries)

    @property
    def environment(self) -> str:
        """The last plan's environment, in which a rerun continues."""
        return self.journal.plans[-1].environment


def merge(directories: Sequence[Path], out: Path, *, allow_environment_change: bool = False) -> Merged:
    """Write the lines of several runs' journals to one in `out`, byte by byte, with each trial from one run.

    A diverged trial goes before an ended one, and an ended one before an interrupted one; otherwise the first run counts.
    Raises ValueError for fewer than two runs, runs of different suites, a journal without a plan, and an `out` that
    holds a journal.
    """
    different = {path.resolve(): path for path in directories}
    if len(different) < 2:
        raise ValueError("te-bench merge joins two runs or more: name their --out directories")
    if written(out):
        raise ValueError(f"{out} holds a journal already: choose another --out")
    runs = [_Run.read(path) for path in different.values()]
    first, *others = runs
    for run in runs:
        if not run.journal.plans:
            raise ValueError(f"{run.name} holds a journal without a plan: te-bench run --out {run.name} writes one")
        if _suites(run) != _suites(first):
            raise ValueError(
                f"{first.name} ran {_suites(first)} and {run.name} ran {_suites(run)}: merge takes runs of one sweep. "
                f"te-bench report {first.name} {run.name} shows both."
            )
    mismatch = tuple(dict.fromkeys(said for run in others for said in _environment_differences(first, run)))
    if mismatch and not allow_environment_change:
        return Merged(mismatch=mismatch)
    chosen = _choose_runs(runs)
    with Store(out) as store:
        store.copy(_join_lines(runs, chosen))
        if len(environments := {run.environment for run in runs}) > 1:
            store.add_merged(environments)
        merged = store.journal
    notes = [
        f"{run.name}: the journal ends in the middle of a line, which is left out" for run in runs if run.journal.torn
    ]
    notes += [said for run in others for said in _note_plan_differences(first, run)]
    planned = {(trial_of(value).id, plan.environment) for plan in merged.plans for value in plan.trials}
    notes += _note_repeats(runs)
    return Merged(mismatch=mismatch, notes=tuple(notes), records=sum(map(merged.done, planned)), planned=len(planned))


def _suites(run: _Run) -> str:
    """Return the suites of a run in words."""
    names = sorted({plan.suite for plan in run.journal.plans})
    return printable(f"the suite{'s' if len(names) > 1 else ''} {', '.join(names)}")


def _environment_differences(first: _Run, run: _Run) -> tuple[str, ...]:
    """Return how the environments differ in which two runs would continue."""
    if run.environment == first.environment:
        return ()
    before, after = (identity(each.journal.environments.get(each.environment, {})) for each in (first, run))
    return differences(before, after)


def _choose_runs(runs: Sequence[_Run]) -> dict[Key, _Run]:
    """Return {trial: the run to take it from}."""

    def rank(run: _Run, key: Key) -> int:
        if any(
            b'"outcome":"diverged"' in line for line in run.tries[key]
        ):  # a result that a second try may not replace
            return 0
        return 1 if run.journal.done(key) else 2

    keys = dict.fromkeys(key for run in runs for key in run.tries)
    return {key: min((run for run in runs if key in run.tries), key=lambda r: rank(r, key)) for key in keys}


def _join_lines(runs: Iterable[_Run], chosen: dict[Key, _Run]) -> list[Line]:
    """Return the runs' lines in order: a trial's from its chosen run, other lines once each."""
    found: dict[bytes, Line] = {}
    for run in runs:
        found |= {line.raw: line for line in run.lines if line.key is None or chosen[line.key] is run}
    return list(found.values())


def _note_plan_differences(first: _Run, run: _Run) -> list[str]:
    """Return sentences about how the plans of two runs differ."""
    said = []
    for what in ("title", "baseline", "judgement"):
        before, after = (
            {plan.suite: _plan_field(each, plan, what) for plan in each.journal.plans} for each in (first, run)
        )
        said += [
            printable(f"{what} of {suite}: {before[suite]} in {first.name}, {after[suite]} in {run.name}")
            for suite in before
            if before[suite] != after[suite]
        ]
    names = [
        {trial.id: trial.name for plan in each.journal.plans for trial in map(trial_of, plan.trials)}
        for each in (first, run)
    ]
    for (mine, its), (a, b) in zip((names, names[::-1]), ((first, run), (run, first)), strict=True):
        if more := [name for key, name in its.items() if key not in mine]:
            many = count_trials(len(more))
            said.append(printable(f"{b.name} plans {many} that {a.name} does not: {first_of(more, 1)}"))
    return said


def _plan_field(run: _Run, plan: Plan, what: str) -> str:
    """Return a field of a plan; for its baseline, a hash, the name of a trial in the run's plans."""
    if what != "baseline":
        return str(getattr(plan, what))
    trials = (trial_of(value) for each in run.journal.plans for value in each.trials)
    return next((trial.name for trial in trials if trial.cell == plan.baseline), str(plan.baseline))


def _note_repeats(runs: Sequence[_Run]) -> list[str]:
    """Return a sentence about trials that ended differently in several runs, of which one counts."""
    measured: dict[Key, set[tuple[bytes, ...]]] = {}
    for run in runs:
        for key in filter(run.journal.done, run.tries):
            measured.setdefault(key, set()).add(tuple(run.tries[key]))
    if not (number := sum(len(different) > 1 for different in measured.values())):
        return []
    return [
        f"{count_trials(number)} ended in several runs: a divergence counts first, then the run that is named first"
    ]
