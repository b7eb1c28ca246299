"""The figure of a training step against its floor, kind by kind of kernel."""

from collections.abc import Callable

from matplotlib.figure import Figure

from te_bench.models import cost
from te_bench.reports.analysis import floor
from te_bench.reports.analysis.floor import Breakdown
from te_bench.reports.analysis.rows import Group
from te_bench.reports.page import stacked, text
from te_bench.reports.page.stacked import Stack

KINDS = (cost.GEMM, cost.ATTENTION, cost.ELEMENTWISE, cost.LOSS, cost.OPTIMIZER)


def against_floor(group: Group) -> Callable[[], Figure] | None:
    """Two bars, the floor and the step, for the baseline and the fastest step of each precision; None without ceilings."""
    shown = [stack for found in floor.compared(group) for stack in _stacks(found)]
    return (lambda: stacked.bars(shown, KINDS, "ms a step")) if shown else None


def _stacks(found: Breakdown) -> tuple[Stack, Stack]:
    least = {part.cost.kind: part.floor_s * 1e3 for part in found.parts}
    took = {part.cost.kind: part.measured_s * 1e3 for part in found.parts}
    step = (found.rung.latency_s or 0.0) * 1e3
    name, baseline = found.rung.cell.label, ", baseline" if found.rung.is_baseline else ""
    return (
        Stack(name=name, parts=least, remark=f"floor, {text.milliseconds(found.floor_s)} ms"),
        Stack(
            name=name,
            parts=took,
            rest=max(step - sum(took.values()), 0.0),
            remark=f"{text.milliseconds(found.rung.latency_s)} ms{baseline}",
        ),
    )
