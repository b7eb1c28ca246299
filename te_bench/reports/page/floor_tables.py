"""The tables of a training step against its floor."""

from te_bench.reports.analysis import floor
from te_bench.reports.analysis.rows import Group
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, label, number, table_of, word

KERNELS_SHOWN = 25  # of a step, the longest


def floors(group: Group) -> Table | None:
    """Every rung whose kernels were timed: its floor, its kernels, its step."""
    shown = [
        (
            label(found.rung.cell, baseline=found.rung.is_baseline),
            number(found.floor_s, text.milliseconds),
            number(found.measured_s, text.milliseconds),
            number(found.rung.latency_s, text.milliseconds),
            _times(found.rung.latency_s, found.floor_s),
        )
        for found in floor.breakdowns(group)
    ]
    columns = ("Configuration", "Floor, ms", "Kernels, ms", "Step, ms", "Step / floor")
    return table_of("floor", "The step against its floor", columns, shown, _ceilings_note(group))


def kinds(group: Group) -> Table | None:
    """The baseline and the fastest step of each precision, by kind of kernel."""
    shown = [
        (
            word(found.rung.cell.label),
            word(part.cost.kind),
            number((part.cost.bf16_flop + part.cost.fp8_flop) or None, text.tera),
            number(part.cost.bytes / 1e9 if part.cost.bytes else None),
            number(part.floor_s, text.milliseconds),
            number(part.measured_s, text.milliseconds),
            _times(part.measured_s, part.floor_s),
        )
        for found in floor.compared(group)
        for part in found.parts
    ]
    columns = ("Configuration", "Kind", "TFLOP", "GB", "Floor, ms", "Measured, ms", "Measured / floor")
    caption = "Kinds of kernels against their floors"
    return table_of("floor_kinds", caption, columns, shown, _ceilings_note(group), text_columns=2)


def kernels(group: Group) -> Table | None:
    """The longest kernels of the baseline and of the fastest step of each precision."""
    shown = [
        (
            word(found.rung.cell.label),
            word(floor.kind(kernel)),
            word(text.shortened(kernel, 80)),
            number(seconds, text.milliseconds),
        )
        for found in floor.compared(group)
        for kernel, seconds in list(floor.kernels(found.rung.cell).items())[:KERNELS_SHOWN]
    ]
    columns = ("Configuration", "Kind", "Kernel", "ms a step")
    return table_of("floor_kernels", "The longest kernels of a step", columns, shown, text_columns=3)


def _times(value: float | None, least: float) -> Value:
    return number(value / least if value is not None and least else None, text.plain)


def _ceilings_note(group: Group) -> str:
    at = floor.ceilings(group)
    if at is None:
        return ""
    rates = [f"a copy's {at.bytes_per_s / 1e12:.2f} TB/s", f"bf16 {text.tera(at.bf16_flop_per_s)} TFLOP/s"]
    rates += [f"FP8 {text.tera(at.fp8_flop_per_s)} TFLOP/s"] if at.fp8_flop_per_s else []
    return f"Ceilings measured in the same run: {', '.join(rates)} of a large square GEMM."
