"""The tables of training steps: time, memory, the floor, and the largest batch."""

from te_bench.reports.analysis import floor
from te_bench.reports.analysis.floor import Ceilings
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import (
    Table,
    Value,
    kernel_rows,
    label,
    number,
    rank,
    ranking_notes,
    repetitions,
    speedup,
    table_of,
    word,
)

KERNELS_SHOWN = 25  # of a step, the longest


def ladder(result: GroupResult) -> Table | None:
    """Time of a training step, fastest first."""
    steps = result.steps.steps
    shown = [
        (
            label(step.cell, baseline=step.is_baseline),
            number(step.latency_s, text.milliseconds),
            speedup(step.speedup),
            rank(result.steps, step),
            number(step.tokens_per_s, text.thousands),
            number(step.flop_per_s, text.tera),
            number(step.mfu, text.percent),
            repetitions(step.cell),
        )
        for step in steps
    ]
    columns = ("Configuration", "ms/step", "Speed-up", "Ranking", "tokens/s", "TFLOP/s", "MFU", "ok/planned")
    return table_of("ladder", "Time per training step", columns, shown, " ".join(_ladder_notes(result)))


def _ladder_notes(result: GroupResult) -> list[str]:
    steps = result.steps.steps
    notes = []
    if any(step.latency_s for step in steps):
        notes.append("ms/step is the geometric mean over runs of each run's median step.")
        notes.append("Whiskers in the figure: 5th to 95th percentile of the steps.")
    how = ranking_notes(result.steps, steps)
    if len({step.speedup.n for step in steps if step.speedup and not step.is_baseline}) > 1:
        how.insert(1, "Of a configuration with fewer runs than the baseline it is the baseline's over the speed-up.")
    notes += how
    if peaks := sorted({step.mfu_peak for step in steps if step.mfu_peak}):
        named = " and ".join(peak.upper() for peak in peaks)
        notes.append(f"MFU is nanoGPT's FLOP count over the GPU's dense {named} peak.")
    if any(step.mfu and step.cell.trial.precision == "fp8" for step in steps):
        notes.append("The MFU of an FP8 configuration is quoted against the BF16 peak.")
    return notes


def memory(result: GroupResult) -> Table | None:
    """Peak memory of a training step."""
    steps = result.steps.steps
    on_gpu = any(step.peak_allocated or step.peak_reserved for step in steps)
    on_host = any(step.peak_rss for step in steps)
    if not on_gpu and not on_host:
        return None
    shown = [
        (
            label(step.cell),
            *((number(step.peak_allocated, text.gib), number(step.peak_reserved, text.gib)) if on_gpu else ()),
            *((number(step.peak_rss, text.gib),) if on_host else ()),
        )
        for step in steps
        if step.latency_s is not None
    ]
    columns = ["Configuration", *(["Peak allocated, GiB", "Peak reserved, GiB"] if on_gpu else [])]
    columns += ["Peak resident, GiB"] if on_host else []
    return table_of("memory", "Peak memory of a training step", columns, shown)


def floors(result: GroupResult) -> Table | None:
    """Every configuration whose kernels were timed: its floor, its kernels, its step."""
    shown = [
        (
            label(found.step.cell, baseline=found.step.is_baseline),
            number(found.floor_s, text.milliseconds),
            number(found.measured_s, text.milliseconds),
            number(found.step.latency_s, text.milliseconds),
            _times(found.step.latency_s, found.floor_s),
        )
        for found in result.floor.breakdowns
    ]
    columns = ("Configuration", "Floor, ms", "Kernels, ms", "Step, ms", "Step / floor")
    return table_of("floor", "The step against its floor", columns, shown, _ceilings_note(result.floor.ceilings))


def floor_kinds(result: GroupResult) -> Table | None:
    """The baseline and the fastest step of each precision, by kind of kernel."""
    shown = [
        (
            word(found.step.cell.label),
            word(kind.cost.kind),
            number((kind.cost.bf16_flop + kind.cost.fp8_flop) or None, text.tera),
            number(kind.cost.bytes / 1e9 if kind.cost.bytes else None),
            number(kind.floor_s, text.milliseconds),
            number(kind.measured_s, text.milliseconds),
            _times(kind.measured_s, kind.floor_s),
        )
        for found in result.floor.compared
        for kind in found.kinds
    ]
    columns = ("Configuration", "Kind", "TFLOP", "GB", "Floor, ms", "Measured, ms", "Measured / floor")
    caption, note = "Kinds of kernels against their floors", _ceilings_note(result.floor.ceilings)
    return table_of("floor_kinds", caption, columns, shown, note, text_columns=2)


def floor_kernels(result: GroupResult) -> Table | None:
    """The longest kernels of the baseline and of the fastest step of each precision."""
    compared = result.floor.compared
    shown = [row for b in compared for row in kernel_rows(b.step.cell, b.kernels, floor.kind_of, KERNELS_SHOWN)]
    columns = ("Configuration", "Kind", "Kernel", "ms a step")
    return table_of("floor_kernels", "The longest kernels of a step", columns, shown, text_columns=3)


def _times(value: float | None, least: float) -> Value:
    return number(value / least if value is not None and least else None)


def _ceilings_note(at: Ceilings | None) -> str:
    if at is None:
        return ""
    rates = [f"a copy's {at.bytes_per_s / 1e12:.2f} TB/s", f"bf16 {text.tera(at.bf16_flop_per_s)} TFLOP/s"]
    rates += [f"FP8 {text.tera(at.fp8_flop_per_s)} TFLOP/s"] if at.fp8_flop_per_s else []
    return f"Ceilings measured in the same run: {', '.join(rates)} of a large square GEMM."


def largest_batch(result: GroupResult) -> Table | None:
    """The largest batch that fits."""
    shown = [
        (
            label(found.cell),
            number(found.max_batch, text.count),
            number(found.peak_allocated, text.gib),
            number(found.first_failed, text.count),
            number(found.limit_gib),
        )
        for found in result.largest_batches
    ]
    columns = ("Configuration", "Largest batch", "Peak memory, GiB", "Smallest that failed", "Memory limit, GiB")
    return table_of("max_batch", "Largest batch that fits", columns, shown)
