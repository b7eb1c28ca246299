"""Write records as pytest-benchmark's JSON, which its own `compare`, github-action-benchmark and Bencher read.

There is one benchmark for each record and timed quantity, in seconds. The key "te_bench", which other tools ignore, holds
what pytest_import.py needs to restore the journal.

github-action-benchmark (tool: pytest) needs of each benchmark fullname, stats.ops, .stddev, .mean and .rounds (its
src/extract.ts). Bencher (adapter python_pytest) needs objects machine_info and commit_info, a fullname of 1 to
1024 characters, and stats.median with .iqr or stats.mean with .stddev (its adapters/python/pytest.rs).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from te_bench.experiments.spec import Record, Trial, matches
from te_bench.experiments.store import Journal, Plan, load
from te_bench.reports.analysis import measures
from te_bench.reports.analysis.naming import FOREIGN
from te_bench.reports.analysis.rows import TIMED, identity, trial_of
from te_bench.reports.exchange.pytest_stats import summary
from te_bench.reports.files import write_file

FORMAT = "5.3.1"  # the version of pytest-benchmark that writes such JSON
SCHEMA = 1  # of the value under "te_bench"
_LONGEST = 1024  # characters of a benchmark's name: Bencher's limit


def write(
    directory: Path, file: Path, *, only: str | None = None, environment: str | None = None
) -> tuple[int, tuple[str, ...]]:
    """Write DIR's records as pytest-benchmark's JSON; return the number of benchmarks, and the environments left out.

    Raises ValueError as `export` does, and if the file cannot be written.
    """
    journal = load(directory)
    found = export(journal, only=only, environment=environment)
    write_file(file, (json.dumps(found, indent=4, allow_nan=False) + "\n").encode(), "--pytest-benchmark")
    chosen = found["te_bench"]["environment"]["id"]
    return len(found["benchmarks"]), tuple(dict.fromkeys(key[1] for key in journal.records if key[1] != chosen))


def export(journal: Journal, *, only: str | None = None, environment: str | None = None) -> dict[str, Any]:
    """Return the JSON value of one environment's records: the last plan's, or the one whose id begins with `environment`.

    only: a glob over trial names. Raises ValueError for an unknown environment, and if no record has timed samples.
    """
    chosen = _environment(journal, environment)
    body = journal.environments.get(chosen, {"id": chosen})
    records = [record for key, record in journal.records.items() if key[1] == chosen]
    records = [record for record in records if matches(record.trial.name, only)]
    kept = {record.trial.id for record in records}
    plans = [_kept(plan, kept if only else None) for plan in journal.plans if plan.environment == chosen]
    benchmarks = _benchmarks(records, plans, body)
    if not benchmarks:
        which = f" match {only!r}" if only else f" in the environment {chosen}"
        raise ValueError(f"no record{which} has timed samples: nothing to export (te-bench report shows what there is)")
    return {
        "machine_info": machine_info(body),
        "commit_info": commit_info(body),
        "benchmarks": benchmarks,
        "datetime": max(record.started_at for record in records),
        "version": FORMAT,
        "te_bench": {
            "schema": SCHEMA,
            "environment": body,
            "plans": [{name: getattr(plan, name) for name in Plan.__slots__} for plan in plans],
            "records": [replace(one, samples=_beside(one)).to_json() for one in records],
            "timed": {record.trial.id: list(_timed(record)) for record in records},  # samples that benchmarks hold
        },
    }


def machine_info(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return pytest-benchmark's machine_info of an environment; null for what was not recorded."""
    known, details = identity(body), body.get("details") or {}
    return {
        "node": None,
        "processor": known.get("cpu"),
        "machine": None,
        "python_compiler": None,
        "python_implementation": None,
        "python_implementation_version": known.get("python"),
        "python_version": known.get("python"),
        "python_build": None,
        "release": details.get("kernel"),
        "system": details.get("os"),
        "cpu": {"brand_raw": known.get("cpu"), "count": known.get("cores")},
        "gpu": known.get("gpu"),
        "environment": body.get("id"),
    }


def commit_info(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return pytest-benchmark's commit_info of an environment; its "unversioned" if no commit was recorded."""
    details = body.get("details") or {}
    return {
        "id": details.get("git_commit") or "unversioned",
        "time": details.get("git_commit_time"),
        "author_time": None,
        "dirty": bool(details.get("git_dirty")),
        "project": "te-bench",
        "branch": details.get("git_branch") or "(unknown)",
    }


def _environment(journal: Journal, asked: str | None) -> str:
    """Return the id of the environment to export."""
    known = list(dict.fromkeys([*(plan.environment for plan in journal.plans), *(key[1] for key in journal.records)]))
    if not known:
        raise ValueError("the journal holds no plan and no record: there is nothing to export")
    if asked is None:
        return journal.plans[-1].environment if journal.plans else known[-1]
    found = [key for key in known if asked and key.startswith(asked)]
    if len(found) != 1:
        raise ValueError(
            f"--environment {asked}: {'several' if found else 'no'} ids begin so; known: {', '.join(known)}"
        )
    return found[0]


def _kept(plan: Plan, trials: set[str] | None) -> Plan:
    if trials is None:
        return plan
    return replace(plan, trials=tuple(value for value in plan.trials if trial_of(value).id in trials))


def _timed(record: Record) -> dict[str, list[float]]:
    """Return the timed samples of a record that ended ok, if all their values are numbers."""
    if record.outcome != "ok":
        return {}
    samples = {quantity: record.samples.get(quantity) or [] for quantity in TIMED}
    return {name: values for name, values in samples.items() if values and len(measures.numbers(values)) == len(values)}


def _beside(record: Record) -> dict[str, Any]:
    """Return the samples that no benchmark holds."""
    timed = _timed(record)
    return {name: values for name, values in record.samples.items() if name not in timed}


def _benchmarks(records: Sequence[Record], plans: Sequence[Plan], body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one benchmark for each timed quantity of each record that ended ok, in the order of the records."""
    suites = {trial_of(value).id: plan.suite for plan in plans for value in plan.trials}
    names = [record.trial.name for record in records]
    found = []
    for record in records:
        trial = record.trial
        words = (trial.attention, trial.precision, trial.recipe, trial.mode, f"s{trial.seed}")
        same = names.count(trial.name) > 1  # the names hide a difference in settings, so ids are added
        for quantity, values in _timed(record).items():
            name = trial.name + (f"#{trial.id[:8]}" if same else "") + TIMED[quantity]
            found.append(
                {
                    "group": "/".join(trial.name.split("/")[:2]) + TIMED[quantity],
                    "name": name,
                    "fullname": f"{suites.get(trial.id, 'te-bench')}::{name}"[:_LONGEST],
                    "params": _params(trial),
                    "param": "-".join(filter(None, words)),
                    "extra_info": _extra(record, quantity, body),
                    "options": _options(trial, len(values)),
                    "stats": summary(values),
                }
                | _as_it_was(trial)
            )
    return found


def _params(trial: Trial) -> dict[str, Any]:
    fields = ("workload", "device", "attention", "precision", "recipe", "mode", "protocol", "seed")
    return {**trial.problem, **{name: getattr(trial, name) for name in fields}}


def _as_it_was(trial: Trial) -> dict[str, Any]:
    """Return the original names and parameters of a benchmark from pytest-benchmark; {} for any other."""
    if trial.workload != FOREIGN:
        return {}
    given = {key.removeprefix("param:"): value for key, value in trial.problem.items() if key.startswith("param:")}
    return {
        "group": trial.problem.get("group"),
        "name": trial.problem.get("name"),
        "fullname": trial.problem.get("variant"),
        "params": given or None,
        "param": trial.problem.get("param"),
    }


def _extra(record: Record, quantity: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what pytest-benchmark has no field for: the GPU, memory, work, and the record's ids."""
    known = identity(body)
    sampled = {name: record.samples.get(f"peak_{name}_bytes") for name in ("allocated", "reserved", "rss")}
    peaks = {f"peak_{name}_bytes": measures.highest(measures.numbers(s)) for name, s in sampled.items() if s}
    return {
        **{name: known.get(name) for name in ("device", "gpu", "driver", "cuda", "cudnn", "torch", "triton")},
        **peaks,
        **{name: record.work[name] for name in ("tokens", "flop") if name in record.work},
        "cell": record.trial.cell,
        "te_bench": {"trial": record.trial.id, "quantity": quantity},
    }


def _options(trial: Trial, rounds: int) -> dict[str, Any]:
    return {
        "disable_gc": False,
        "timer": "torch.cuda.Event" if trial.device == "cuda" else "perf_counter",
        "min_rounds": rounds,
        "max_time": None,
        "min_time": None,
        "precision": None,
        "confidence": None,
        "warmup": True,
        "protocol": trial.protocol,
    }
