"""The tables of what became of trials: errors against the reference, failures, and the kernels that ran."""

from te_bench.reports.analysis.rows import printable
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, number, table_of, word


def errors(result: GroupResult) -> Table | None:
    """How near each configuration came to the limit of its check."""
    shown = [
        (
            word(error.cell.trial.workload),
            word(f"{error.cell.shape} {error.cell.label}".strip()),
            word(error.quantity),
            number(error.error, text.scientific),
            number(error.limit, text.scientific),
            number(error.ratio),
        )
        for error in result.errors
    ]
    columns = ("Workload", "Configuration", "Worst quantity", "Error", "Limit", "Error / limit")
    references = ", ".join(dict.fromkeys(printable(str(e.reference)) for e in result.errors if e.reference))
    note = f"Above 1 the check fails and nothing is timed. Reference: {references}." if references else ""
    return table_of("errors", "Error against the reference", columns, shown, note, text_columns=3)


def failures(result: GroupResult) -> Table | None:
    """Every planned trial that did not end ok, with its reason."""
    shown = [
        (word(row.outcome), word(row.trial.name), word(row.reason), word(row.run))
        for cell in result.group.cells
        for row in cell.rows
        if row.outcome != "ok"
    ]
    columns = ("Outcome", "Trial", "Reason", "Run")
    return table_of("failures", "Trials that did not end ok", columns, shown, text_columns=4)


def kernels(result: GroupResult) -> Table | None:
    """The kernels that ran in each configuration, as the profiler named them."""
    shown = []
    for cell in result.group.cells:
        names = dict.fromkeys(text.shortened(printable(str(n)), 80) for record in cell.ok for n in record.kernels)
        if names:
            shown.append(
                (word(cell.trial.workload), word(f"{cell.shape} {cell.label}".strip()), word(", ".join(names)))
            )
    return table_of("kernels", "Kernels that ran", ("Workload", "Configuration", "Kernels"), shown, text_columns=3)
