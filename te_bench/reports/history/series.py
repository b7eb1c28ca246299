"""Order a configuration's times over commits and environments, and find where their level changed.

A series is one configuration (a trial without its seed) and one timed quantity on one kind of machine. A point is the
measurement of one run in one environment: the median over processes of each process's median. Code, driver and packages
may differ between points.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from te_bench.experiments.spec import Record, Trial, matches
from te_bench.experiments.store import Journal, load
from te_bench.reports.analysis import measures
from te_bench.reports.analysis.naming import FOREIGN
from te_bench.reports.analysis.rows import TIMED, grouped, identity, listed_names, printable
from te_bench.reports.history.change_points import ALPHA, ChangePoint, Segmentation, segment

#: The fields of an environment that identify a machine; each machine has its own series.
_MACHINE = ("device", "gpu", "cpu", "cores", "threads")


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPoint:
    """The measurement of one run in one environment. Times are UTC, ISO 8601.

    at: the time that orders points: the commit's if all points of the family have one, else the measurement's.
    """

    run: str
    environment: str
    at: str
    measured_at: str
    commit: str  # its first 10 digits, + if files were changed; ~ and the code's hash if no commit was recorded
    seconds: float

    @property
    def order(self) -> tuple[str, str, str]:
        return self.at, self.measured_at, self.run

    @property
    def place(self) -> tuple[str, str]:
        """The key of the point in its series."""
        return self.run, self.environment


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSeries:
    """The ordered times of a configuration, and their segments."""

    name: str  # plain
    only: str  # the name that `only` matches: its trials' name without the seed
    family: str  # the workload and its problem; a family shares one figure
    where: str  # the machine
    points: tuple[HistoryPoint, ...]
    found: Segmentation

    @property
    def changes(self) -> tuple[ChangePoint, ...]:
        return self.found.changes

    def commits(self, change: ChangePoint) -> str:
        """Return the first commit of the new level, with the range of those that it may be."""
        names = [point.commit for point in self.points]
        if change.first == change.last:
            return names[change.index]
        return f"{names[change.index]} ({names[change.first]}..{names[change.last]})"


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All series of several runs, ordered by family; `alpha` is the false-alarm rate of each series."""

    series: tuple[TimeSeries, ...]
    runs: tuple[str, ...]
    alpha: float

    def families(self) -> dict[tuple[str, str], list[TimeSeries]]:
        """Return {(family, machine): series}, in order."""
        return grouped(self.series, lambda one: (one.family, one.where))


def load_history(directories: Sequence[Path], *, only: str | None = None, alpha: float = ALPHA) -> History:
    """Return the history of several runs' journals.

    only: a glob over trials' names without the seed. Raises ValueError for a directory
    without a journal, if no timed record matches, and for an alpha outside [0.0001, 0.5].
    """
    journals = {_run(path, directories): load(path) for path in dict.fromkeys(map(Path.resolve, directories))}
    return from_journals(journals, only=only, alpha=alpha)


def _run(path: Path, among: Iterable[Path]) -> str:
    """Return a directory's name, with its parent's if another directory has the same name."""
    same = {other.resolve() for other in among if other.resolve().name == path.name}
    return path.name if len(same) == 1 else f"{path.parent.name}/{path.name}"


def from_journals(journals: Mapping[str, Journal], *, only: str | None = None, alpha: float = ALPHA) -> History:
    """Return the history of {name of a run: journal}. A measurement that two journals hold counts once."""
    measured: dict[tuple[str, str, tuple[Any, ...]], dict[tuple[str, str], list[Record]]] = {}
    bodies: dict[tuple[str, str], Mapping[str, Any]] = {}
    trials: dict[str, Trial] = {}
    known: set[tuple[str, str, str]] = set()
    for run, journal in journals.items():
        for (trial, environment), record in journal.records.items():
            copy = (trial, environment, record.started_at)
            if record.outcome != "ok" or copy in known:
                continue
            known.add(copy)
            cell = trials.setdefault(record.trial.cell, record.trial).cell
            bodies[run, environment] = journal.environments.get(environment, {})
            machine = tuple(identity(bodies[run, environment]).get(key) for key in _MACHINE)
            for quantity in TIMED:
                if measures.numbers(record.samples.get(quantity)):
                    at = measured.setdefault((cell, quantity, machine), {})
                    at.setdefault((run, environment), []).append(record)
    names, plain = _names(trials), listed_names(trials)
    chosen = {key: found for key, found in measured.items() if matches(names[key[0]] + TIMED[key[1]], only)}
    if not chosen:
        raise ValueError(
            f"--only {only}: no timed series matches; there are {', '.join(sorted(names.values())[:5]) or 'none'}"
            if only and measured
            else "no record of these runs has timed samples: there is no history to show"
        )
    families = grouped(chosen, lambda key: (_family(trials[key[0]]) + TIMED[key[1]], key[2]))
    dated = {
        key: all(_commit_time(bodies[place]) for other in keys for place in chosen[other])
        for keys in families.values()
        for key in keys
    }
    labels = _labels({machine for _, _, machine in chosen})
    series = []
    for (cell, quantity, machine), found in chosen.items():
        points = _points(found, bodies, quantity, dated=dated[cell, quantity, machine])
        series.append(
            TimeSeries(
                name=plain[cell] + TIMED[quantity].replace("/", ", "),
                only=names[cell] + TIMED[quantity],
                family=_family(trials[cell]) + TIMED[quantity],
                where=labels[machine],
                points=points,
                found=segment([point.seconds for point in points], alpha=alpha),
            )
        )
    return History(series=tuple(one for one in series if one.points), runs=tuple(journals), alpha=alpha)


def _points(
    found: Mapping[tuple[str, str], Sequence[Record]],
    bodies: Mapping[tuple[str, str], Mapping[str, Any]],
    quantity: str,
    *,
    dated: bool,
) -> tuple[HistoryPoint, ...]:
    """Return the points of one series in order of commit times if `dated`, else of measurement times."""
    points = []
    for place, records in found.items():
        seconds = measures.typical(records, quantity)
        if not seconds:  # a coarse clock measured 0
            continue
        measured_at = _utc(min(record.started_at for record in records))
        points.append(
            HistoryPoint(
                run=place[0],
                environment=place[1],
                at=_utc(_commit_time(bodies[place])) if dated else measured_at,
                measured_at=measured_at,
                commit=_commit(bodies[place]),
                seconds=seconds,
            )
        )
    return tuple(sorted(points, key=lambda point: point.order))


def _commit_time(body: Mapping[str, Any]) -> Any:
    return (body.get("details") or {}).get("git_commit_time")


def _utc(stamp: Any) -> str:
    """Return the time in UTC, so that strings sort like times."""
    found = datetime.fromisoformat(str(stamp))
    return found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC).isoformat()


def _commit(body: Mapping[str, Any]) -> str:
    details = body.get("details") or {}
    commit = details.get("git_commit")
    if commit:
        return printable(f"{str(commit)[:10]}{'+' if details.get('git_dirty') else ''}")
    return printable(f"~{str(identity(body).get('code') or body.get('id') or 'unknown')[:9]}")


def _names(trials: Mapping[str, Trial]) -> dict[str, str]:
    """Return {configuration: name}: its trials' name without the seed, with the start of its id if two share a name."""
    plain = {cell: _name(trial) for cell, trial in trials.items()}
    shared = [name for name in plain.values() if list(plain.values()).count(name) > 1]
    return {cell: f"{name}#{cell[:8]}" if name in shared else name for cell, name in plain.items()}


def _name(trial: Trial) -> str:
    if trial.workload == FOREIGN:
        return printable(str(trial.problem.get("variant")))
    return printable(trial.name.rpartition("/")[0])


def _family(trial: Trial) -> str:
    """Return the workload and its problem; for a foreign benchmark its group, or its file."""
    if trial.workload == FOREIGN:
        return printable(str(trial.problem.get("group") or str(trial.problem.get("variant")).split("::")[0]))
    return printable("/".join(trial.name.split("/")[:2]))


def _labels(machines: Collection[Sequence[Any]]) -> dict[Sequence[Any], str]:
    """Return {machine, by _MACHINE: its GPU}; its CPU if it has no GPU; both where several machines have that GPU."""
    gpus = [gpu for _, gpu, *_ in machines if gpu]
    found = {}
    for machine in machines:
        _, gpu, cpu, cores, threads = machine
        parts = [str(gpu)] if gpu else []
        if gpus.count(gpu) != 1:
            parts += [str(cpu or "unknown machine"), *([f"{cores} cores"] if cores else [])]
            parts += [f"{threads} threads"] if threads and threads != cores else []
        found[machine] = printable(", ".join(parts))
    return found
