"""The report's tables: one definition of columns and formatting for the page, for Markdown and for the terminal."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from te_bench.reports.analysis import curves, measures, ranking
from te_bench.reports.analysis.ranking import ranked
from te_bench.reports.analysis.rows import Group, load_results, printable
from te_bench.reports.page import floor_tables, layer_tables, text, verdict_tables
from te_bench.reports.page.headlines import headlines
from te_bench.reports.page.table import Table, Value, interval_note, label, number, repetitions, table_of, word

TERMINAL_WIDTH = 100
LEAST_NAME = 40  # characters of a name's line
#: What a terminal does not show, and what it leaves out where names have no room, the first first.
UNSHOWN = ("TFLOP/s", "MFU")
GIVING_WAY = ("Peak reserved, GiB", "tokens/s", "Peak, GiB", "ok/planned")


def ladder(group: Group) -> Table | None:
    """Time of a training step, fastest first."""
    rungs = measures.ladder(group)
    standing = ranking.standing(rungs)
    mfu_of = sorted({rung.mfu_peak for rung in rungs if rung.mfu_peak})
    shown = [
        (
            label(rung.cell, baseline=rung.is_baseline),
            number(rung.latency_s, text.milliseconds),
            Value(text=text.speedup(rung.speedup), sort=rung.speedup.value if rung.speedup else None),
            ranked(standing, rung),
            number(rung.tokens_per_s, text.thousands),
            number(rung.flop_per_s, text.tera),
            number(rung.mfu, text.percent),
            repetitions(rung.cell),
        )
        for rung in rungs
    ]
    columns = ("Configuration", "ms/step", "Speed-up", ranking.COLUMN, "tokens/s", "TFLOP/s", "MFU", "ok/planned")
    notes = []
    if any(rung.latency_s for rung in rungs):
        notes.append("ms/step is the geometric mean over runs of each run's median step.")
        notes.append("Whiskers in the figure: 5th to 95th percentile of the steps.")
    pairs = [rung.speedup.n for rung in rungs if rung.speedup and not rung.is_baseline]
    if pairs:
        notes.append(interval_note(pairs))
        if len(set(pairs)) > 1:
            notes.append("Of a configuration with fewer runs than the baseline it is the baseline's over the speed-up.")
    notes += standing.notes()
    if mfu_of:
        peaks = " and ".join(f"{p.upper()}" for p in mfu_of)
        notes.append(f"MFU is nanoGPT's FLOP count over the GPU's dense {peaks} peak.")
    if any(rung.mfu and rung.cell.trial.precision == "fp8" for rung in rungs):
        notes.append("The MFU of an FP8 configuration is quoted against the BF16 peak.")
    return table_of("ladder", "Time per training step", columns, shown, " ".join(notes))


def memory(group: Group) -> Table | None:
    """Peak memory of a training step."""
    rungs = measures.ladder(group)
    on_gpu = any(rung.peak_allocated or rung.peak_reserved for rung in rungs)
    on_host = any(rung.peak_rss for rung in rungs)
    if not on_gpu and not on_host:
        return None
    shown = [
        (
            label(rung.cell),
            *((number(rung.peak_allocated, text.gib), number(rung.peak_reserved, text.gib)) if on_gpu else ()),
            *((number(rung.peak_rss, text.gib),) if on_host else ()),
        )
        for rung in rungs
        if rung.latency_s is not None
    ]
    columns = ["Configuration", *(["Peak allocated, GiB", "Peak reserved, GiB"] if on_gpu else [])]
    columns += ["Peak resident, GiB"] if on_host else []
    return table_of("memory", "Peak memory of a training step", columns, shown)


def training(group: Group) -> list[Table]:
    """What each arm of each training comparison reached."""
    tables = []
    for comparison in curves.comparisons(group):
        against = comparison.reference.cell.label if comparison.reference else None
        shown = [
            (
                label(arm.cell),
                Value(text=text.loss(arm.best, arm.deviation), sort=arm.best),
                Value(text=_signed(comparison.behind(arm)), sort=comparison.behind(arm)),
                number(arm.steps_done, text.count),
                number(arm.batch, text.count),
                number(arm.tokens, text.thousands),
                number(arm.tokens_per_s, text.thousands),
                repetitions(arm.cell),
            )
            for arm in comparison.arms
        ]
        columns = ("Arm", "Best validation loss", "Less BF16's", "Steps", "Batch", "Tokens", "tokens/s", "ok/planned")
        note = f"BF16's is that of {against}." if against else "No BF16 arm to compare with."
        if any(arm.deviation is not None for arm in comparison.arms):
            note += " ± is the standard deviation over seeds."
        table = table_of("curves", f"Training: {comparison.title}", columns, shown, note)
        tables += [table] if table else []
    return tables


def _signed(value: float | None) -> str:
    return text.MISSING if value is None else f"{value:+.4f}".replace("-", "−")


def max_batch(group: Group) -> Table | None:
    """The largest batch that fits."""
    shown = [
        (
            label(found.cell),
            number(found.max_batch, text.count),
            number(found.peak_allocated, text.gib),
            number(found.first_failed, text.count),
            number(found.limit_gib),
        )
        for found in measures.max_batch(group)
    ]
    columns = ("Configuration", "Largest batch", "Peak memory, GiB", "Smallest that failed", "Memory limit, GiB")
    return table_of("max_batch", "Largest batch that fits", columns, shown)


def attention(group: Group) -> Table | None:
    """Attention alone, forward and backward."""
    shown = [
        (
            word(rung.cell.shape),
            label(rung.cell),
            number(rung.forward_s, text.milliseconds),
            number(rung.backward_s, text.milliseconds),
            number(rung.forward_flop_per_s, text.tera),
            number(rung.backward_flop_per_s, text.tera),
            repetitions(rung.cell),
        )
        for rung in measures.attention(group)
    ]
    columns = ("Shape", "Kernel", "Forward, ms", "Backward, ms", "Forward, TFLOP/s", "Backward, TFLOP/s", "ok/planned")
    return table_of("attention", "Attention alone", columns, shown, text_columns=2)


def attention_ratios(group: Group) -> Table | None:
    """How many times as fast as its peer each attention is."""
    found = [rung for rung in measures.attention(group) if rung.over]
    shown = [
        (
            word(rung.cell.shape),
            label(rung.cell),
            *(
                Value(text=text.speedup(ratio), sort=ratio.value if ratio else None)
                for ratio in map(rung.over.get, ("forward", "backward", "both"))
            ),
        )
        for rung in found
    ]
    caption = f"How many times as fast as {measures.attention_peer(group)}"
    note = interval_note([ratio.n for rung in found for ratio in rung.over.values()]) if found else ""
    return table_of(
        "attention_ratios", caption, ("Shape", "Kernel", "Forward", "Backward", "Both"), shown, note, text_columns=2
    )


def numerics(group: Group) -> Table | None:
    """Where to scale: error of attention when q is scaled before or after QK^T."""
    shown = [
        (
            word(found.cell.shape),
            label(found.cell),
            number(measures.median(found.before), text.scientific),
            number(measures.median(found.after), text.scientific),
            number(measures.median(found.sdpa), text.scientific),
            word({True: "yes", False: "no", None: ""}[found.allclose]),
            Value(text=str(len(found.before) or text.MISSING), sort=len(found.before) or None),
        )
        for found in measures.numerics(group)
    ]
    columns = ("Shape", "Kernel", "Scaled before", "Scaled after", "SDPA", "allclose", "Draws")
    note = "Largest relative error against FP64, median over draws. allclose: SDPA against the manual formula."
    return table_of("numerics", "Error of attention by where q is scaled", columns, shown, note, text_columns=2)


def errors(group: Group) -> Table | None:
    """How near each cell came to the limit of its check."""
    found = measures.errors(group)
    shown = [
        (
            word(error.cell.trial.workload),
            word(f"{error.cell.shape} {error.cell.label}".strip()),
            word(error.quantity),
            number(error.error, text.scientific),
            number(error.limit, text.scientific),
            number(error.ratio),
        )
        for error in found
    ]
    columns = ("Workload", "Configuration", "Worst quantity", "Error", "Limit", "Error / limit")
    references = ", ".join(dict.fromkeys(printable(str(error.reference)) for error in found if error.reference))
    note = f"Above 1 the check fails and nothing is timed. Reference: {references}." if references else ""
    return table_of("errors", "Error against the reference", columns, shown, note, text_columns=3)


def failures(group: Group) -> Table | None:
    """Every planned trial that did not end ok, with its reason."""
    shown = [
        (word(row.outcome), word(row.trial.name), word(row.reason), word(row.run))
        for cell in group.cells
        for row in cell.rows
        if row.outcome != "ok"
    ]
    columns = ("Outcome", "Trial", "Reason", "Run")
    return table_of("failures", "Trials that did not end ok", columns, shown, text_columns=4)


def kernels(group: Group) -> Table | None:
    """The kernels that ran in each cell, as the profiler named them."""
    shown = []
    for cell in group.cells:
        names = dict.fromkeys(text.shortened(printable(str(n)), 80) for record in cell.ok for n in record.kernels)
        if names:
            rung = f"{cell.shape} {cell.label}".strip()
            shown.append((word(cell.trial.workload), word(rung), word(", ".join(names))))
    return table_of("kernels", "Kernels that ran", ("Workload", "Configuration", "Kernels"), shown, text_columns=3)


#: The tables by the name that `embed` and the page use.
TABLES: dict[str, Callable[[Group], list[Table] | Table | None]] = {
    "ladder": ladder,
    "memory": memory,
    "floor": floor_tables.floors,
    "floor_kinds": floor_tables.kinds,
    "floor_kernels": floor_tables.kernels,
    "layer": layer_tables.layer,
    "layer_kinds": layer_tables.kinds,
    "layer_kernels": layer_tables.kernels,
    "curves": training,
    "verdict": verdict_tables.all_gaps,
    "verdict_reasons": verdict_tables.all_reasons,
    "stability": verdict_tables.stability,
    "stress": verdict_tables.stress,
    "max_batch": max_batch,
    "attention": attention,
    "attention_ratios": attention_ratios,
    "numerics": numerics,
    "errors": errors,
    "failures": failures,
    "kernels": kernels,
}


def of_group(group: Group, name: str) -> list[Table]:
    """The tables of one name for one group; none where the group measured nothing of the kind."""
    found = TABLES[name](group)
    return found if isinstance(found, list) else [found] if found else []


def markdown(table: Table) -> str:
    """The table in GitHub's Markdown; whatever a record says stays text."""
    lines = ["| " + " | ".join(escape(column.title) for column in table.columns) + " |"]
    lines.append("|" + "|".join("---:" if column.numeric else "---" for column in table.columns) + "|")
    lines += ["| " + " | ".join(escape(value.text) for value in row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def escape(content: str) -> str:
    """Text that Markdown shows as it stands: no markup, no HTML, no end of a table cell."""
    for special, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        content = content.replace(special, entity)
    for special in "\\|`*[]~$":
        content = content.replace(special, "\\" + special)
    return content


def summary(directories: Sequence[Path]) -> str:
    """The ladder in plain text for a terminal of 100 columns. Raises ValueError as load_results does."""
    results = load_results(directories)
    lines = [f"{results.outcomes.get('ok', 0)} of {len(results.rows)} trials ok"]
    for sentence in headlines(results):
        lines += textwrap.wrap(sentence, TERMINAL_WIDTH)
    for group in results.groups:
        for table in [*of_group(group, "ladder"), *of_group(group, "layer")]:
            shown = f"{group.title} ({group.where})" if table.name == "ladder" else f"{table.caption} ({group.where})"
            title = text.shortened(printable(shown), TERMINAL_WIDTH)
            lines += ["", title, *terminal(table)]
    return "\n".join(lines) + "\n"


def terminal(table: Table) -> list[str]:
    """The table's lines: columns padded to their widest value; those that say least give way to names, in their order.

    A name that has no room even so goes on below, for its end may be all that tells it from another.
    """
    columns = [[column.title, *(row[i].text for row in table.rows)] for i, column in enumerate(table.columns)]
    widths = [max(map(len, column)) for column in columns]
    kept = [i for i, column in enumerate(table.columns) if column.title not in UNSHOWN]
    for i in [i for title in GIVING_WAY for i in kept if table.columns[i].title == title]:
        if _room(widths, kept) < min(widths[0], LEAST_NAME):
            kept.remove(i)
    width = max(12, min(widths[0], _room(widths, kept)))
    lines = []
    for line in zip(*(columns[i] for i in kept), strict=True):
        first, *more = textwrap.wrap(line[0], width, subsequent_indent="  ", break_on_hyphens=False)
        shown = [value.rjust(widths[i]) for value, i in zip(line[1:], kept[1:], strict=True)]
        lines += ["  ".join([first.ljust(width), *shown]), *more]
    return lines


def _room(widths: Sequence[int], kept: Sequence[int]) -> int:
    """Characters that the other columns leave to names."""
    return TERMINAL_WIDTH - sum(widths[i] + 2 for i in kept[1:])
