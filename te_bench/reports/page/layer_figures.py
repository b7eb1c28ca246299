"""The figure of the layer benchmark: what an iteration's time is made of, kind by kind, for every rung."""

from collections.abc import Callable

from matplotlib.figure import Figure

from te_bench.reports.analysis import layers
from te_bench.reports.analysis.measures import Rung
from te_bench.reports.analysis.rows import Group
from te_bench.reports.page import stacked, text
from te_bench.reports.page.stacked import Stack

KINDS = [*(name for name, _ in layers.KINDS), layers.OTHER]


def breakdowns(group: Group) -> list[tuple[str, Callable[[], Figure]]]:
    """(variant, figure): stacked bars of milliseconds by kind of kernel; rungs without a profile are one plain bar."""
    return [
        (variant.name, lambda shown=shown: stacked.bars(shown, KINDS, "ms forward and backward"))  # type: ignore[misc]
        for variant in layers.variants(group)
        if (shown := [_stack(rung) for rung in variant.rungs if rung.latency_s])
    ]


def _stack(rung: Rung) -> Stack:
    """What is left of the measured time is rest; without a profile all of it is `other`."""
    assert rung.latency_s is not None
    measured = rung.latency_s * 1e3
    parts = {kind: seconds * 1e3 for kind, seconds in layers.by_kind(rung.cell).items()} or {layers.OTHER: measured}
    remark = f"{text.milliseconds(rung.latency_s)} ms" + (", baseline" if rung.is_baseline else "")
    return Stack(name=rung.cell.label, parts=parts, rest=max(measured - sum(parts.values()), 0.0), remark=remark)
