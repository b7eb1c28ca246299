"""The tables of attention alone: its times, by which factor a kernel is faster than its peer, and where to scale q."""

from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, interval_note, label, number, repetitions, speedup, table_of, word


def times(result: GroupResult) -> Table | None:
    """Seconds and TFLOP/s, forward and backward."""
    shown = [
        (
            word(time.cell.shape),
            label(time.cell),
            number(time.forward_s, text.milliseconds),
            number(time.backward_s, text.milliseconds),
            number(time.forward_flop_per_s, text.tera),
            number(time.backward_flop_per_s, text.tera),
            repetitions(time.cell),
        )
        for time in result.attention.times
    ]
    columns = ("Shape", "Kernel", "Forward, ms", "Backward, ms", "Forward, TFLOP/s", "Backward, TFLOP/s", "ok/planned")
    return table_of("attention", "Attention alone", columns, shown, text_columns=2)


def ratios(result: GroupResult) -> Table | None:
    """How many times as fast as its peer each attention is."""
    found = [time for time in result.attention.times if time.speedups]
    shown = [
        (
            word(time.cell.shape),
            label(time.cell),
            *(speedup(time.speedups.get(way)) for way in ("forward", "backward", "both")),
        )
        for time in found
    ]
    columns = ("Shape", "Kernel", "Forward", "Backward", "Both")
    note = interval_note([ratio.n for time in found for ratio in time.speedups.values()]) if found else ""
    caption = f"How many times as fast as {result.attention.peer}"
    return table_of("attention_ratios", caption, columns, shown, note, text_columns=2)


def scaling_errors(result: GroupResult) -> Table | None:
    """Error of attention when q is scaled before or after QK^T."""
    shown = [
        (
            word(found.cell.shape),
            label(found.cell),
            number(found.before_median, text.scientific),
            number(found.after_median, text.scientific),
            number(found.sdpa_median, text.scientific),
            word({True: "yes", False: "no", None: ""}[found.allclose]),
            Value(text=str(len(found.before) or text.MISSING), sort=len(found.before) or None),
        )
        for found in result.scaling_errors
    ]
    columns = ("Shape", "Kernel", "Scaled before", "Scaled after", "SDPA", "allclose", "Draws")
    note = "Largest relative error against FP64, median over draws. allclose: SDPA against the manual formula."
    return table_of("numerics", "Error of attention by where q is scaled", columns, shown, note, text_columns=2)
