"""Write records as CSV: a line for each planned trial, medians in SI units, empty where nothing was measured."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from te_bench.reports.analysis.checks import worst_quantity
from te_bench.reports.analysis.measures import finite, median, numbers
from te_bench.reports.analysis.rows import Configuration, Row
from te_bench.reports.group_result import GroupResult, ReportResult

_MEDIANS = (
    "latency_s",
    "forward_s",
    "backward_s",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_rss_bytes",
    "max_batch",
    "error_scale_before",
    "error_scale_after",
    "error_sdpa",
)


def records_csv(report: ReportResult) -> str:
    """Return a line for each planned trial: settings, outcome, medians in SI units.

    Empty is what was not measured, and the loss of a study's runs until its planned runs are done.
    """
    rows = [(result, one, row) for result in report.groups for one in result.group.configurations for row in one.rows]
    problem = sorted({key for _, _, row in rows for key in row.trial.problem})
    lines = [_line(result, configuration, row, problem) for result, configuration, row in rows]
    stream = io.StringIO()
    names = list(lines[0]) if lines else ["run", "suite", "environment", "trial", "outcome", "reason"]
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _safe(value) for name, value in line.items()} for line in lines)
    return stream.getvalue()


def _line(result: GroupResult, configuration: Configuration, row: Row, problem: Sequence[str]) -> dict[str, Any]:
    group, trial, record = result.group, row.trial, row.record
    samples: Mapping[str, Any] = record.samples if record else {}
    work: Mapping[str, Any] = record.work if record else {}
    medians = {name: median(numbers(samples.get(name))) for name in _MEDIANS}
    losses = [] if configuration.id in result.hidden else numbers(samples.get("val_loss"))
    worst = worst_quantity(configuration, record.check) if record else None
    return {
        "run": row.run,
        "suite": row.suite,
        "environment": row.environment,
        "where": group.where,
        "trial": trial.id,
        "cell": trial.cell,
        "baseline": trial.cell == group.baseline,
        "name": trial.name,
        **{key: getattr(trial, key) for key in ("workload", "device", "attention", "precision", "recipe", "mode")},
        "protocol": trial.protocol,
        "seed": trial.seed,
        **{f"problem_{key}": trial.problem.get(key) for key in problem},
        "outcome": row.outcome,
        "reason": row.reason,
        "started_at": record.started_at if record else None,
        "wall_s": record.wall_s if record else None,
        "work_s": record.work_s if record else None,
        **{f"{name}_median": value for name, value in medians.items()},
        "n_steps": len(numbers(samples.get("latency_s"))) or None,
        "best_val_loss": min(losses, default=None),
        **{key: finite(work.get(key)) for key in ("tokens", "flop", "forward_flop", "backward_flop", "batch")},
        "worst_quantity": worst.quantity if worst else None,
        "worst_error": worst.error if worst else None,
        "worst_limit": worst.limit if worst else None,
    }


def _safe(value: object) -> object:
    """Return the value, with an apostrophe before text that a spreadsheet would run as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
