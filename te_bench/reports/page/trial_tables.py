"""Make the tables of trials: errors against the reference, failures, and the kernels that ran."""

from te_bench.reports.analysis.measures import typical
from te_bench.reports.analysis.naming import FOREIGN
from te_bench.reports.analysis.rows import printable
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, number, repetitions, table_of, word


def errors(result: GroupResult) -> Table | None:
    """Return the table of how close each configuration came to the limit of its check."""
    shown = [
        {
            "Workload": word(error.configuration.trial.workload),
            "Configuration": word(f"{error.configuration.shape} {error.configuration.label}".strip()),
            "Worst quantity": word(error.quantity),
            "Error": number(error.error, text.scientific),
            "Limit": number(error.limit, text.scientific),
            "Error / limit": number(error.ratio),
        }
        for error in result.errors
    ]
    references = ", ".join(dict.fromkeys(printable(str(e.reference)) for e in result.errors if e.reference))
    note = f"Above 1 the check fails and nothing is timed. Reference: {references}." if references else ""
    return table_of("errors", "Error against the reference", shown, note, text_columns=3)


def failures(result: GroupResult) -> Table | None:
    """Return the table of planned trials that did not end ok, with reasons."""
    shown = [
        {
            "Outcome": word(row.outcome),
            "Trial": word(row.trial.name),
            "Reason": word(row.reason),
            "Run": word(row.run),
        }
        for configuration in result.group.configurations
        for row in configuration.rows
        if row.outcome != "ok"
    ]
    return table_of("failures", "Trials that did not end ok", shown, text_columns=4)


def specifications(result: GroupResult) -> Table | None:
    """Return the table of all settings behind each name."""
    shown = [
        {
            "Configuration": word(f"{configuration.shape} {configuration.label}".strip()),
            "Every setting but the seed": word(configuration.specification),
        }
        for configuration in result.group.configurations
    ]
    return table_of("specifications", "Configurations in full", shown, text_columns=2)


def benchmarks(result: GroupResult) -> Table | None:
    """Return the table of benchmarks that another tool timed."""
    shown = [
        {
            "Benchmark": word(one.label),
            "ms": number(typical(one.ok, "latency_s"), text.milliseconds),
            "Calls": number(sum(len(record.samples.get("latency_s", ())) for record in one.ok), text.count),
            "ok/planned": repetitions(one),
        }
        for one in result.group.of(FOREIGN)
    ]
    return table_of("benchmarks", "Benchmarks", shown, "ms: the median call.", text_columns=1)


def kernels(result: GroupResult) -> Table | None:
    """Return the table of the kernels that ran in each configuration, as the profiler named them."""
    shown = []
    for configuration in result.group.configurations:
        names = dict.fromkeys(text.shortened(printable(str(n)), 80) for one in configuration.ok for n in one.kernels)
        row = {
            "Workload": word(configuration.trial.workload),
            "Configuration": word(f"{configuration.shape} {configuration.label}".strip()),
            "Kernels": word(", ".join(names)),
        }
        shown += [row] if names else []
    return table_of("kernels", "Kernels that ran", shown, text_columns=3)
