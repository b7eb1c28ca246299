"""Read pytest-benchmark's JSON into a journal: te-bench's own exports as they were, other files as a trial a benchmark."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from te_bench.experiments.spec import Record, Scalar, Trial, digest
from te_bench.experiments.store import Plan, Store
from te_bench.reports.analysis.naming import FOREIGN
from te_bench.reports.analysis.rows import environment_labels, printable, trial_of
from te_bench.reports.exchange.pytest_export import SCHEMA


def read(file: Path) -> dict[str, Any]:
    """Return the JSON value of a file that pytest-benchmark or te-bench export wrote.

    Raises ValueError if the file is missing, is not JSON, has no benchmarks, or has a fullname twice.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:  # covers UnicodeDecodeError and JSONDecodeError
        raise ValueError(f"{file} is not JSON ({error}): give a file of pytest --benchmark-json") from error
    benchmarks = value.get("benchmarks") if isinstance(value, dict) else None
    if not isinstance(benchmarks, list) or not all(map(_is_benchmark, benchmarks)):
        raise ValueError(f"{file} holds no benchmarks with fullname and stats: give a file of pytest --benchmark-json")
    names = [benchmark["fullname"] for benchmark in benchmarks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{file}: {', '.join(twice)} occurs more than once; each benchmark needs a name of its own")
    assert isinstance(value, dict)
    return value


def _is_benchmark(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("stats"), dict):
        return False
    return isinstance(value.get("fullname"), str) and bool(value["fullname"])


def write(file: Path, directory: Path) -> tuple[int, int, int]:
    """Write the benchmarks of a file into DIR's journal; return (records added, that were there, not taken).

    A record is not taken if the journal has another measurement of its trial in its environment.
    Raises ValueError as `read` does, for benchmarks without raw rounds, and if DIR cannot be written or is in use.
    """
    environment, plans, records = journal(read(file), file.name)
    added = others = 0
    with Store(directory) as store:
        store.add_environment(environment)
        planned: dict[tuple[str, ...], set[str]] = {}
        for plan in store.journal.plans:
            planned.setdefault(_run(plan), set()).update(trial_of(value).id for value in plan.trials)
        for plan in plans:  # an export with --only has a part of a run's plan
            if not {trial_of(value).id for value in plan.trials} <= planned.get(_run(plan), set()):
                store.add_plan(plan)
        for record in records:
            known = store.journal.records.get(record.key)
            if known is None or (known.outcome == "interrupted" and record.outcome != "interrupted"):
                store.add(record)
                added += 1
            elif record.outcome != "interrupted":
                others += (known.started_at, known.samples) != (record.started_at, record.samples)
    return added, len(records) - added - others, others


def _run(plan: Plan) -> tuple[str, ...]:
    """Return what plans of one run have in common."""
    return plan.suite, plan.environment, plan.started_at


def describe(file: Path) -> list[str]:
    """Return a line for each plan of a file: its number of trials, the machine, the commit, and the date."""
    environment, plans, _ = journal(read(file), file.name)
    where = environment_labels({environment["id"]: environment})[environment["id"]]
    details = environment["details"]
    commit = str(details.get("git_commit") or "unknown")[:12]
    changed = " with uncommitted changes" if details.get("git_dirty") else ""
    return [
        printable(f"{plan.title}: {len(plan.trials)} trials on {where}, of commit {commit}{changed}, {plan.started_at}")
        for plan in plans
    ]


def journal(value: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[Plan], list[Record]]:
    """Return (environment, plans, records) of a pytest-benchmark JSON value; `name`: the file's, for messages.

    Raises ValueError for benchmarks without stats.data, and for an export with another version of te-bench's schema.
    """
    own = value.get("te_bench")
    if own is None:
        return _foreign(value, name)
    if own.get("schema") != SCHEMA:
        raise ValueError(f"{name} has te-bench export schema {own.get('schema')}; this te-bench reads schema {SCHEMA}")
    timed: dict[str, dict[str, list[float]]] = {}
    for benchmark in value["benchmarks"]:
        part = (benchmark.get("extra_info") or {}).get("te_bench") or {}
        timed.setdefault(str(part.get("trial")), {})[str(part.get("quantity"))] = _data(benchmark, name)
    plans = [Plan.from_json(plan) for plan in own["plans"]]
    records = [_whole(body, own["timed"].get(body["trial"]["id"], []), timed) for body in own["records"]]
    return dict(own["environment"]), plans, [record for record in records if record]


def _whole(
    body: Mapping[str, Any], quantities: Sequence[str], timed: Mapping[str, Mapping[str, list[float]]]
) -> Record | None:
    """Return the record with its timed samples, or None if one of its benchmarks was removed from the file."""
    found = timed.get(body["trial"]["id"], {})
    if any(quantity not in found for quantity in quantities):
        return None
    return Record.from_json({**body, "samples": {**body["samples"], **{q: found[q] for q in quantities}}})


def _data(benchmark: Mapping[str, Any], name: str) -> list[float]:
    """Return the rounds of a benchmark in seconds."""
    values = benchmark["stats"].get("data")
    if not values:
        raise ValueError(
            f"{name}: {benchmark['fullname']} has no stats.data; write the file with pytest --benchmark-json, or with "
            "--benchmark-save-data beside --benchmark-autosave"
        )
    if not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in values):
        raise ValueError(f"{name}: stats.data of {benchmark['fullname']} are not all seconds: {values[:3]}...")
    return [float(v) for v in values]


def _foreign(value: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[Plan], list[Record]]:
    """Return one environment, one plan and a record for each benchmark, of a file that te-bench did not write."""
    benchmarks = value["benchmarks"]
    if not benchmarks:
        raise ValueError(f"{name} holds no benchmark: there is nothing to import")
    environment = _environment(value)
    started = _time(value, name)
    trials = [_trial(benchmark, environment["identity"]["device"]) for benchmark in benchmarks]
    records = [
        Record(
            trial=trial,
            environment=environment["id"],
            outcome="ok",
            started_at=started,
            wall_s=sum(_data(benchmark, name)),
            samples={"latency_s": _data(benchmark, name)},
        )
        for trial, benchmark in zip(trials, benchmarks, strict=True)
    ]
    plan = Plan(
        suite=FOREIGN,
        title=f"pytest-benchmark: {(value.get('commit_info') or {}).get('project') or name}",
        environment=environment["id"],
        trials=tuple(trial.to_json() for trial in trials),
        baseline=None,
        started_at=started,
    )
    return environment, [plan], records


def _time(value: Mapping[str, Any], name: str) -> str:
    """Return the file's time of measurement in UTC; older versions of pytest-benchmark write UTC without a zone."""
    try:
        found = datetime.fromisoformat(str(value.get("datetime")))
    except ValueError as error:
        raise ValueError(f"{name}: datetime {value.get('datetime')!r} is not an ISO 8601 time") from error
    return found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC).isoformat(timespec="seconds")


def _environment(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of a foreign file. Its code is the commit: two commits are two environments."""
    machine, commit = value.get("machine_info") or {}, value.get("commit_info") or {}
    cpu = machine.get("cpu") or {}
    gpu = _common(value["benchmarks"], "gpu")
    dirty = bool(commit.get("dirty"))
    identity = {
        "device": "cuda" if gpu else "cpu",
        "gpu": gpu,
        **{key: _common(value["benchmarks"], key) for key in ("driver", "cuda", "cudnn", "torch", "triton")},
        "python": machine.get("python_version"),
        "cpu": cpu.get("brand_raw") or cpu.get("brand") or machine.get("processor"),
        "cores": cpu.get("count"),
        "threads": None,
        "code": " and changes of ".join(map(str, [commit.get("id"), *([value.get("datetime")] if dirty else [])])),
    }
    details: dict[str, Any] = {
        "os": machine.get("system"),
        "kernel": machine.get("release"),
        "node": machine.get("node"),
        "git_commit": commit.get("id"),
        "git_dirty": dirty,
        "git_commit_time": commit.get("time"),
        "git_branch": commit.get("branch"),
        "packages": {"pytest-benchmark": value.get("version")},
        "gpus": [],
    }
    return {"id": digest(identity), "identity": identity, "details": details}


def _common(benchmarks: Sequence[Mapping[str, Any]], key: str) -> Any:
    """Return the value of `key` that all benchmarks' extra_info agree on; None if they disagree or lack it."""
    found = [(benchmark.get("extra_info") or {}).get(key) for benchmark in benchmarks]
    said = {str(v): v for v in found if v is not None}
    return next(iter(said.values())) if len(said) == 1 else None


def _trial(benchmark: Mapping[str, Any], device: str) -> Trial:
    """Return a benchmark as a trial of one repetition; its parameters that are JSON scalars become settings."""
    params = benchmark.get("params") or {}
    problem: dict[str, Scalar] = {
        "variant": benchmark["fullname"],
        "name": benchmark.get("name") or benchmark["fullname"],
        "group": benchmark.get("group"),
        "param": benchmark.get("param"),
        **{f"param:{key}": value for key, value in params.items() if _scalar(value)},
    }
    return Trial(
        workload=FOREIGN,
        device=device,
        problem=problem,
        attention="none",
        precision="none",
        protocol=FOREIGN,
    )


def _scalar(value: object) -> bool:
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
