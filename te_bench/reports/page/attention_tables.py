"""The tables of attention alone: its times, by which factor a kernel is faster than its peer, and where to scale q."""

from te_bench.reports.analysis.measures import median
from te_bench.reports.analysis.naming import kernel_name
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import (
    ENERGY_NOTE,
    Table,
    Value,
    interval_note,
    label,
    number,
    repetitions,
    speedup,
    table_of,
    word,
)


def times(result: GroupResult) -> Table | None:
    """Seconds and TFLOP/s, forward and backward, and millijoules of both."""
    measured = result.attention.times
    shown = [
        {
            "Shape": word(time.configuration.shape),
            "Kernel": label(time.configuration),
            "Forward, ms": number(time.forward_s, text.milliseconds),
            "Backward, ms": number(time.backward_s, text.milliseconds),
            "Forward, TFLOP/s": number(time.forward_flop_per_s, text.tera),
            "Backward, TFLOP/s": number(time.backward_flop_per_s, text.tera),
            "Both, mJ": number(time.energy_j and 1e3 * time.energy_j),
            "ok/planned": repetitions(time.configuration),
        }
        for time in measured
    ]
    note = ENERGY_NOTE if any(time.energy_j for time in measured) else ""
    return table_of("attention", "Attention alone", shown, note, text_columns=2)


def ratios(result: GroupResult) -> Table | None:
    """How many times as fast as its peer each attention is."""
    found = [time for time in result.attention.times if time.speedups]
    shown = [
        {"Shape": word(time.configuration.shape), "Kernel": label(time.configuration)}
        | {way.capitalize(): speedup(time.speedups.get(way)) for way in ("forward", "backward", "both")}
        for time in found
    ]
    note = interval_note([ratio.n for time in found for ratio in time.speedups.values()]) if found else ""
    title = f"How many times as fast as {kernel_name(result.attention.peer or '')}"
    return table_of("attention_ratios", title, shown, note, text_columns=2)


def scaling_errors(result: GroupResult) -> Table | None:
    """Error of attention when q is scaled before or after QK^T."""
    shown = [
        {
            "Shape": word(found.configuration.shape),
            "Kernel": label(found.configuration),
            "Scaled before": number(median(found.before), text.scientific),
            "Scaled after": number(median(found.after), text.scientific),
            "SDPA": number(median(found.sdpa), text.scientific),
            "allclose": word({True: "yes", False: "no", None: ""}[found.allclose]),
            "Draws": Value(text=str(len(found.before) or text.MISSING), sort=len(found.before) or None),
        }
        for found in result.scaling_errors
    ]
    note = "Largest relative error against FP64, median over draws. allclose: SDPA against the manual formula."
    return table_of("numerics", "Error of attention by where q is scaled", shown, note, text_columns=2)
