"""Make the tables of training steps: time, memory, the floor, and the largest batch."""

import functools

from te_bench.reports.analysis import floor
from te_bench.reports.analysis.floor import Ceilings
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import (
    ENERGY_NOTE,
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

KERNELS_SHOWN = 25  # the longest of a step


def ladder(result: GroupResult) -> Table | None:
    """Return the table of a training step's time and energy, fastest first."""
    counted = any(step.energy_j for step in result.steps.steps)
    shown = [
        {
            "Configuration": label(step.configuration, baseline=step.is_baseline),
            "ms/step": number(step.latency_s, text.milliseconds),
            "Speed-up": speedup(step.speedup),
            "Ranking": rank(result.steps, step),
            **({"J/step": number(step.energy_j)} if counted else {}),
            "tokens/s": number(step.tokens_per_s, text.thousands),
            "TFLOP/s": number(step.flop_per_s, text.tera),
            "MFU": number(step.mfu, text.percent),
            "ok/planned": repetitions(step.configuration),
        }
        for step in result.steps.steps
    ]
    return table_of("ladder", "Time per training step", shown, " ".join(_ladder_notes(result)))


def _ladder_notes(result: GroupResult) -> list[str]:
    steps = result.steps.steps
    notes = []
    if any(step.latency_s for step in steps):
        notes.append("ms/step is the geometric mean over runs of each run's median step.")
        notes.append("Whiskers in the figure: 5th to 95th percentile of the steps.")
    if any(step.energy_j for step in steps):
        notes.append(ENERGY_NOTE)
    how = ranking_notes(result.steps, steps)
    if result.steps.by_pairs:
        how.insert(
            1, "For a configuration with fewer runs than the baseline it is the baseline's time over the speed-up."
        )
    notes += how
    if peaks := sorted({step.mfu_peak for step in steps if step.mfu_peak}):
        named = " and ".join(peak if peak == "bf16" else peak.upper() for peak in peaks)
        notes.append(f"MFU is nanoGPT's FLOP count over the GPU's dense {named} peak.")
    if any(step.mfu and step.configuration.trial.precision == "fp8" for step in steps):
        notes.append("The MFU of an FP8 configuration is quoted against the bf16 peak.")
    return notes


def memory(result: GroupResult) -> Table | None:
    """Return the table of a training step's peak memory, and energy by token."""
    steps = result.steps.steps
    on_gpu = any(step.peak_allocated or step.peak_reserved for step in steps)
    on_host = any(step.peak_rss for step in steps)
    counted = any(step.energy_per_token for step in steps)
    if not on_gpu and not on_host:
        return None
    shown = []
    for step in steps:
        row = {"Configuration": label(step.configuration)}
        if on_gpu:
            row["Peak allocated, GiB"] = number(step.peak_allocated, text.gib)
            row["Peak reserved, GiB"] = number(step.peak_reserved, text.gib)
        if on_host:
            row["Peak resident, GiB"] = number(step.peak_rss, text.gib)
        if counted:
            row["mJ/token"] = number(step.energy_per_token and 1e3 * step.energy_per_token)
        shown += [row] if step.latency_s is not None else []
    what = "Peak memory of a training step" + (", and energy of a token" if counted else "")
    return table_of("memory", what, shown, "mJ a token are kJ a million tokens." if counted else "")


def floors(result: GroupResult) -> Table | None:
    """Return the table of configurations with timed kernels: floor, kernels, step."""
    shown = [
        {
            "Configuration": label(found.step.configuration, baseline=found.step.is_baseline),
            "Floor, ms": number(found.floor_s, text.milliseconds),
            "Kernels, ms": number(found.measured_s, text.milliseconds),
            "Step, ms": number(found.step.latency_s, text.milliseconds),
            "Step / floor": _times(found.step.latency_s, found.floor_s),
        }
        for found in result.floor.breakdowns
    ]
    return table_of("floor", "The step against its floor", shown, _ceilings_note(result.floor.ceilings))


def floor_kinds(result: GroupResult) -> Table | None:
    """Return the table of the baseline and the fastest step of each precision, by kind of kernel."""
    shown = [
        {
            "Configuration": word(found.step.configuration.label),
            "Kind": word(kind.cost.kind),
            "TFLOP": number((kind.cost.bf16_flop + kind.cost.fp8_flop) or None, text.tera),
            "GB": number(kind.cost.bytes / 1e9 if kind.cost.bytes else None),
            "Floor, ms": number(kind.floor_s, text.milliseconds),
            "Measured, ms": number(kind.measured_s, text.milliseconds),
            "Measured / floor": _times(kind.measured_s, kind.floor_s),
        }
        for found in result.floor.compared
        for kind in found.kinds
    ]
    note = _ceilings_note(result.floor.ceilings)
    return table_of("floor_kinds", "Kinds of kernels against their floors", shown, note, text_columns=2)


def floor_kernels(result: GroupResult) -> Table | None:
    """Return the table of the longest kernels of the baseline and of the fastest step of each precision."""
    titles = "Configuration", "ms a step"
    shown = [
        row
        for found in result.floor.compared
        for row in kernel_rows(found.step.configuration, found.kernels, floor.kind_of, KERNELS_SHOWN, titles)
    ]
    return table_of("floor_kernels", "The longest kernels of a step", shown, text_columns=3)


def _times(value: float | None, least: float) -> Value:
    return number(value / least if value is not None and least else None)


def _ceilings_note(at: Ceilings | None) -> str:
    if at is None:
        return ""
    rates = [f"a copy's {at.bytes_per_s / 1e12:.2f} TB/s", f"bf16 {text.tera(at.bf16_flop_per_s)} TFLOP/s"]
    rates += [f"FP8 {text.tera(at.fp8_flop_per_s)} TFLOP/s"] if at.fp8_flop_per_s else []
    return f"Ceilings measured in the same run: {', '.join(rates)} of a large square GEMM."


def largest_batch(result: GroupResult) -> Table | None:
    """Return the table of largest batches that fit."""
    shown = [
        {
            "Configuration": label(found.configuration),
            "Largest batch": number(found.max_batch, functools.partial(text.count, or_more=found.capped)),
            "Peak memory, GiB": number(found.peak_allocated, text.gib),
            "Smallest that failed": number(found.first_failed, text.count),
            "Memory limit, GiB": number(found.limit_gib),
        }
        for found in result.largest_batches
    ]
    return table_of("max_batch", "Largest batch that fits", shown)
