"""Turn journals into rows (planned trials), configurations (their repetitions) and groups (one suite in one environment)."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from te_bench.experiments.spec import OUTCOMES, Record, Trial
from te_bench.experiments.store import Journal, Plan, load, understood
from te_bench.reports.analysis.naming import NAMED, SHAPED, plain_names, specification
from te_bench.reports.analysis.naming import printable as printable

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

#: The outcome of a planned trial without a record, and what to do.
NOT_RUN, GO_ON = "not run yet", "rerun the same command to go on"
#: {timed sample of a record, in seconds: what it adds to its trial's name}.
TIMED = {"latency_s": "", "forward_s": "/forward", "backward_s": "/backward"}

#: Settings of a machine that older records do not have.
LATER = frozenset(("kernels", "max_sm_clock_hz", "power_limit_w", "variables"))

#: Settings that must agree for two loss curves to be comparable. The batch may differ: each arm has the largest that fits.
_COURSE = ("model", "block", "data", "data_sha256", "corpus", "tokenizer", "order", "steps", "branch_at", "budget_s")
_OF_MODEL = ("model", "batch", "sequence")  # of a layer outside the quickstart


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One planned trial and its record, or None if it has not run yet. host: the GPUs of the host that ran it, if known."""

    run: str  # name of the run's directory
    suite: str
    environment: str
    trial: Trial
    record: Record | None
    host: frozenset[str] = frozenset()

    @property
    def outcome(self) -> str:
        return self.record.outcome if self.record else NOT_RUN

    @property
    def reason(self) -> str | None:
        return self.record.reason if self.record else GO_ON


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """Repetitions of one trial, which differ in seed and run; `label`: its plain name, see naming."""

    rows: tuple[Row, ...]
    label: str

    @property
    def id(self) -> str:
        return self.trial.cell

    @property
    def trial(self) -> Trial:
        return self.rows[0].trial

    @property
    def specification(self) -> str:
        """All settings, as planned."""
        return specification(self.trial)

    @property
    def ok(self) -> tuple[Record, ...]:
        return tuple(row.record for row in self.rows if row.record and row.outcome == "ok")

    @property
    def outcome(self) -> str:
        """ "ok" if any repetition is, else the first one's outcome."""
        return "ok" if self.ok else self.rows[0].outcome

    @property
    def course(self) -> tuple[object, ...]:
        """The data and the budget of a training; configurations with the same may be compared."""
        return tuple(self.trial.problem.get(key) for key in _COURSE)

    @property
    def shape(self) -> str:
        return shape_of(self.trial)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The configurations of one suite in one environment; they may be compared with each other."""

    suite: str
    title: str
    environment: str
    where: str  # readable name of the environment
    gpu: str | None
    baseline: str | None  # id of the configuration that is 1.00x
    configurations: tuple[Configuration, ...]
    judged: tuple[Plan, ...] = ()  # the plans that fix how a verdict is judged, oldest first
    #: The command-line options of its plans, oldest first.
    asked: tuple[tuple[str, ...], ...] = ((),)
    directory: Path | None = None  # of the first of its runs
    broken_off: str | None = None  # why its study was given up

    def of(self, workload: str) -> tuple[Configuration, ...]:
        return tuple(configuration for configuration in self.configurations if configuration.trial.workload == workload)


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """All results of a report: groups in the order in which suites were planned, newest environment first."""

    groups: tuple[Group, ...]
    environments: Mapping[str, Mapping[str, Any]]
    runs: tuple[str, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for group in self.groups for one in group.configurations for row in one.rows)

    @property
    def outcomes(self) -> dict[str, int]:
        """{outcome: its number of rows}, without outcomes that do not occur."""
        found = [row.outcome for row in self.rows]
        return {outcome: found.count(outcome) for outcome in (*OUTCOMES, NOT_RUN) if outcome in found}


def load_results(directories: Sequence[Path]) -> Results:
    """Return the results of several runs. Raises ValueError if a directory has no journal, or its journal no plan."""
    journals: dict[str, Journal] = {}
    for directory in dict.fromkeys(path.resolve() for path in directories):
        journal = load(directory)
        if not journal.plans:
            raise ValueError(f"{directory} holds a journal without a plan: run te-bench run --out {directory} first")
        if any(environment not in journal.environments for _, environment in journal.records):
            raise ValueError(
                f"{directory}: the line that names the machine of some records is missing from its journal. "
                "The same te-bench run on that machine writes it again."
            )
        journals[unique(directory.name, journals)] = journal
    return from_journals(journals)


def from_journals(journals: Mapping[str, Journal]) -> Results:
    """Return the results of {run: journal}, merged. A measurement that two journals hold counts once."""
    rows: dict[tuple[str, str], list[Row]] = {}
    plans: dict[tuple[str, str], list[Plan]] = {}
    bodies: dict[str, Mapping[str, Any]] = {}
    directories: dict[tuple[str, str], Path | None] = {}
    broken_off: dict[tuple[str, str], str | None] = {}
    for run, journal in journals.items():
        for key, planned in _planned(journal).items():
            found = _rows(run, planned, journal)
            plans.setdefault(key, []).extend(reversed(planned))  # title and baseline are the latest plan's
            known = {_measurement(row) for row in rows.setdefault(key, []) if row.record}
            rows[key].extend(row for row in found if _measurement(row) not in known)
            directories.setdefault(key, journal.directory)
            broken_off[key] = broken_off.get(key) or journal.broken_off
            bodies[key[1]] = journal.environments.get(key[1], {})
    where = environment_labels(bodies)
    groups = tuple(
        Group(
            suite=suite,
            title=plans[suite, environment][0].title.replace("BF16", "bf16"),  # older plans have both
            environment=environment,
            where=where[environment],
            gpu=identity(bodies[environment]).get("gpu"),
            baseline=next((p.baseline for p in plans[suite, environment] if p.baseline), None),
            configurations=_configurations(rows[suite, environment]),
            judged=tuple(
                sorted((p for p in reversed(plans[suite, environment]) if p.judgement), key=lambda p: p.started_at)
            ),
            asked=tuple(dict.fromkeys(p.asked for p in reversed(plans[suite, environment]))),
            directory=directories[suite, environment],
            broken_off=broken_off[suite, environment],
        )
        for suite, environment in rows
    )
    return Results(groups=groups, environments=bodies, runs=tuple(journals))


def gaps(directories: Sequence[Path]) -> list[str]:
    """Return sentences about what the journals of these runs lack. Raises ValueError as `load_results` does.

    A journal that lost whole lines at its end cannot be told from that of a stopped run.
    """
    torn = [directory for directory in directories if load(directory).torn]
    said = [f"{directory}: the journal ends in the middle of a line, which is not read" for directory in torn]
    found = load_results(directories).rows
    if missing := sum(row.record is None for row in found):
        lost = "not run, or lost from the journal's end: run the same te-bench run command again"
        said.append(f"{missing} of {len(found)} planned trials have no record: {lost}")
    return said


def identity(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of an environment that its id hashes; empty if it was not recorded."""
    return environment.get("identity") or {}


def differences(before: Mapping[str, Any], after: Mapping[str, Any], *, apart: str | None = None) -> tuple[str, ...]:
    """Return how two identities differ, without the setting `apart`, and LATER ones that one of them does not have."""
    found = [] if before and after else ["one of the two machines is not recorded"]
    for name in dict.fromkeys([*before, *after]):
        old, new = ("not recorded" if of.get(name) is None else str(of[name]) for of in (before, after))
        if name in LATER and not (name in before and name in after):
            continue
        if name != apart and before.get(name) != after.get(name):
            found.append(printable(f"{name}: {old} -> {new}"))
    return tuple(found)


def environment_labels(environments: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return {environment: GPU or CPU, with the first settings that distinguish it from the others}."""
    machines = {key: _machine(identity(body)) for key, body in environments.items()}
    labels = dict(machines)
    for setting in ("torch", "triton", "cuda", "cudnn", "driver", "python", "code"):
        if len(set(labels.values())) == len(labels):
            break
        for key, machine in machines.items():
            same = [other for other in machines if machines[other] == machine]
            if len({str(identity(environments[other]).get(setting)) for other in same}) > 1:
                value = identity(environments[key]).get(setting)
                labels[key] += f", {setting} {str(value)[:12] if value is not None else 'unknown'}"
    shared = [label for label in labels.values() if list(labels.values()).count(label) > 1]
    return {key: printable(f"{label}, {key[:8]}" if label in shared else label) for key, label in labels.items()}


def _machine(known: Mapping[str, Any]) -> str:
    return str(known.get("gpu") or known.get("cpu") or known.get("device") or "unknown machine")


def shape_of(trial: Trial) -> str:
    """Return B12 H12 T1024 D64 causal, or a layer's variant with its sizes; "" for workloads that train a model."""
    if trial.workload == "layer":
        model, batch, sequence = (trial.problem.get(key) for key in _OF_MODEL)
        of_model = "" if model is None else f"{model} {batch} x {sequence}, "
        return printable(f"{of_model}{trial.problem.get('variant')}")
    return shape_label(trial.problem) if trial.workload in SHAPED else ""


def shape_label(problem: Mapping[str, Any]) -> str:
    """Return the shape of an attention problem: B12 H12 T1024 D64 causal."""
    keys = {"B": "batch", "H": "heads", "T": "length", "D": "head_dim"}
    words = [f"{letter}{problem[key]}" for letter, key in keys.items() if key in problem]
    if "kv_heads" in problem:
        words = [f"{word}/{problem['kv_heads']}" if word.startswith("H") else word for word in words]
    if "causal" in problem:
        mask = "causal" if problem["causal"] else "full"
        windowed = "window_left" in problem
        words.append(f"window {problem['window_left']}:{problem['window_right']}" if windowed else mask)
    if problem.get("documents"):
        words.append(f"{problem['documents']} documents")
    if problem.get("dropout"):
        words.append(f"dropout {problem['dropout']}")
    return " ".join(words)


def _planned(journal: Journal) -> dict[tuple[str, str], list[Plan]]:
    """Return {(suite, environment): its plans, oldest first}: suites as first planned, the newest environment first.

    Of older environments, trials without a record are left out, because a rerun measures them in the newest environment.
    """
    by_suite: dict[str, dict[str, list[Plan]]] = {}
    for plan in journal.plans:
        environments = by_suite.setdefault(plan.suite, {})
        environments[plan.environment] = [*environments.pop(plan.environment, []), plan]  # the newest goes last
    found = {}
    for suite, environments in by_suite.items():
        newest, *older = reversed(environments)
        found[suite, newest] = environments[newest]
        for environment in older:
            plans = [_measured(plan, journal) for plan in environments[environment]]
            if any(plan.trials for plan in plans):
                found[suite, environment] = plans
    return found


def _measured(plan: Plan, journal: Journal) -> Plan:
    trials = tuple(value for value in plan.trials if (trial_of(value).id, plan.environment) in journal.records)
    return dataclasses.replace(plan, trials=trials)


def _rows(run: str, plans: Sequence[Plan], journal: Journal) -> list[Row]:
    """Return one row for each trial of the plans of one suite and environment, in the order of first mention."""
    planned: dict[str, Trial] = {}
    for plan in plans:
        for trial in map(trial_of, plan.trials):
            planned.setdefault(trial.id, trial)
    suite, environment = plans[0].suite, plans[0].environment
    known = {key: journal.records.get((key, environment)) for key in planned}
    return [
        Row(
            run=run,
            suite=suite,
            environment=environment,
            trial=trial,
            record=known[key],
            host=_host(journal, known[key]),
        )
        for key, trial in planned.items()
    ]


def _host(journal: Journal, record: Record | None) -> frozenset[str]:
    gpu = record.device_state.get("uuid") if record else None
    return journal.hosts.get(gpu, frozenset([gpu])) if gpu else frozenset()


def trial_of(value: Mapping[str, Any]) -> Trial:
    """Return a plan's trial."""
    with understood("a plan's trial"):
        return Trial.from_json({key: content for key, content in value.items() if key != "id"})


def _measurement(row: Row) -> tuple[str, str | None]:
    """Return the key of a measurement in its environment."""
    return row.trial.id, row.record.started_at if row.record else None


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return {key: its items}, both in the order of the items."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _configurations(rows: Iterable[Row]) -> tuple[Configuration, ...]:
    by_id = grouped(rows, lambda row: row.trial.cell)
    labels = names({key: found[0].trial for key, found in by_id.items()})
    return tuple(Configuration(rows=tuple(found), label=labels[key]) for key, found in by_id.items())


def names(trials: Mapping[str, Trial]) -> dict[str, str]:
    """Return {key: plain name} of the trials; a name is unique among trials that a report compares."""
    comparable: dict[tuple[object, ...], dict[str, Trial]] = {}
    for key, trial in trials.items():
        together = {"training": _COURSE, "layer": ("variant", *_OF_MODEL)}.get(trial.workload, ())
        course = [trial.problem.get(name) for name in together]
        comparable.setdefault((trial.workload, *course), {})[key] = trial
    return {key: name for alike in comparable.values() for key, name in plain_names(alike).items()}


def listed_names(trials: Mapping[str, Trial]) -> dict[str, str]:
    """Return {key: name} for a list of trials of any workload and shape: the plain name with these; all names differ."""
    several, told = len({trial.workload for trial in trials.values()}) > 1, dict[str, str]()
    for key, name in names(trials).items():
        trial = trials[key]
        work = f"{trial.workload.replace('_', ' ')}: " if several and trial.workload not in NAMED else ""
        told[key] = f"{work}{', '.join(filter(None, [name, shape_of(trial)]))}"
    shared = {name for name, number in Counter(told.values()).items() if number > 1}
    return {key: f"{told[key]} ({trials[key].cell[:6]})" if told[key] in shared else told[key] for key in trials}


def unique(name: str, taken: Collection[object]) -> str:
    """Return the name, with the smallest number that makes it unique if it is taken."""
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name} ({number})"
    return candidate
