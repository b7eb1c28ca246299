"""Draw the figures of training steps and layers: time, memory, the largest batch, and time by kind of kernel."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from te_bench.models import cost
from te_bench.reports.analysis import layers
from te_bench.reports.analysis.floor import Breakdown
from te_bench.reports.analysis.layers import MeasuredLayer
from te_bench.reports.analysis.naming import MODES, precision_name
from te_bench.reports.analysis.rows import Configuration
from te_bench.reports.analysis.steps import MeasuredStep
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.bars import Bar, Stack, bars, stacked_bars
from te_bench.reports.page.drawing import COLOURS, FAINT

PRECISION = {"fp32": "#8a9099", "fp16": "#009e73", "bf16": "#0072b2", "fp8": "#d55e00"}
HATCH = {"eager": "", "compile": "//", "compile-blocks": "..", "compile-reduce-overhead": "xx", "cudagraph": "\\\\"}
FLOOR_KINDS = (cost.GEMM, cost.ATTENTION, cost.ELEMENTWISE, cost.LOSS, cost.OPTIMIZER)
LAYER_KINDS = (*(name for name, _ in layers.KINDS), layers.OTHER)


def _bar(configuration: Configuration, value: float | None, remark: str, **ends: Any) -> Bar:
    """Return a configuration's bar, in its precision's colour with its mode's hatch; ends: the Bar's other lengths."""
    colour, hatch = PRECISION.get(configuration.trial.precision, COLOURS[3]), HATCH.get(configuration.trial.mode, "++")
    return Bar(name=configuration.label, value=value, remark=remark, colour=colour, hatch=hatch, **ends)


def _legend(configurations: Sequence[Configuration]) -> list[Patch]:
    """Return the legend: colours of precisions and hatches of modes, each if several occur."""
    trials = [configuration.trial for configuration in configurations]
    names = {p: dict.fromkeys(precision_name(t) for t in trials if t.precision == p) for p in PRECISION}
    modes = [m for m in HATCH if any(t.mode == m for t in trials)]
    patches = [Patch(facecolor=PRECISION[p], label=", ".join(found)) for p, found in names.items() if found]
    patches = patches if len(patches) > 1 else []
    if len(modes) > 1:
        patches += [
            Patch(facecolor=FAINT, edgecolor="white", hatch=HATCH[m], linewidth=0, label=MODES.get(m, m)) for m in modes
        ]
    return patches


def ladder(result: GroupResult) -> Figure | None:
    """Return ms per step with the 5th to 95th percentile of timed steps, and the speed-up over the baseline."""
    steps = result.steps.steps
    if not any(step.latency_s for step in steps):
        return None
    return bars([_step_bar(step) for step in steps], "ms per step", _legend([step.configuration for step in steps]))


def _step_bar(step: MeasuredStep) -> Bar:
    low, high, value = (None if v is None else v * 1e3 for v in (step.low_s, step.high_s, step.latency_s))
    remark = step.configuration.outcome
    if step.latency_s is not None:
        faster = "baseline" if step.is_baseline else text.speedup(step.speedup) if step.speedup else ""
        remark = ", ".join(word for word in (f"{text.milliseconds(step.latency_s)} ms", faster) if word)
    return _bar(step.configuration, value, remark, low=low, high=high)


def memory(result: GroupResult) -> Figure | None:
    """Return the peak memory of a step: allocated as a bar, reserved as its outline; on a CPU, resident memory."""
    drawn, on_host = [], False
    for step in result.steps.steps:
        value, outline = step.peak_allocated, step.peak_reserved
        if value is None and step.peak_rss is not None:
            value, outline, on_host = step.peak_rss, None, True
        if value is not None:
            inner, outer = (None if v is None else v / text.GIB for v in (value, outline))
            drawn.append(_bar(step.configuration, inner, text.gib(value), outline=outer))
    if not drawn:
        return None
    unit = "peak resident memory, GiB" if on_host else "peak memory, GiB (bar: allocated, outline: reserved)"
    return bars(drawn, unit, _legend([step.configuration for step in result.steps.steps]))


def largest_batch(result: GroupResult) -> Figure | None:
    """Return the largest batches that fit; None if none was measured."""
    found = result.largest_batches
    if not any(m.max_batch for m in found):
        return None
    drawn = [
        _bar(
            m.configuration,
            m.max_batch,
            m.configuration.outcome if m.max_batch is None else text.count(m.max_batch, or_more=m.capped),
        )
        for m in found
    ]
    return bars(drawn, "largest batch that fits, sequences", _legend([m.configuration for m in found]))


def against_floor(result: GroupResult) -> Figure | None:
    """Return two bars, floor and step, for the baseline and the fastest step of each precision; None without ceilings."""
    shown = [stack for found in result.floor.compared for stack in _floor_and_step(found)]
    return stacked_bars(shown, FLOOR_KINDS, "ms a step") if shown else None


def _floor_and_step(found: Breakdown) -> tuple[Stack, Stack]:
    least = {kind.cost.kind: kind.floor_s * 1e3 for kind in found.kinds}
    took = {kind.cost.kind: kind.measured_s * 1e3 for kind in found.kinds}
    floor = Stack(
        name=found.step.configuration.label, parts=least, remark=f"floor, {text.milliseconds(found.floor_s)} ms"
    )
    return floor, _measured(found.step, took)


def _measured(step: MeasuredStep, parts: dict[str, float]) -> Stack:
    """Return a step's bar; the measured time minus its parts is the rest."""
    remark = f"{text.milliseconds(step.latency_s)} ms" + (", baseline" if step.is_baseline else "")
    rest = max((step.latency_s or 0.0) * 1e3 - sum(parts.values()), 0.0)
    return Stack(name=step.configuration.label, parts=parts, rest=rest, remark=remark)


def layer_times(variant_layers: Sequence[MeasuredLayer]) -> Figure | None:
    """Return milliseconds by kind of kernel; a layer without a profile is one plain bar."""
    shown = [_layer(measured) for measured in variant_layers if measured.step.latency_s]
    return stacked_bars(shown, LAYER_KINDS, "ms forward and backward") if shown else None


def _layer(measured: MeasuredLayer) -> Stack:
    parts = {kind: seconds * 1e3 for kind, seconds in measured.by_kind.items()}
    return _measured(measured.step, parts or {layers.OTHER: (measured.step.latency_s or 0.0) * 1e3})
