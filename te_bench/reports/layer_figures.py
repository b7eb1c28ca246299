"""The figure of the layer benchmark: what an iteration's time is made of, kind by kind, for every rung."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from te_bench.reports import layers, text
from te_bench.reports.analysis import Rung
from te_bench.reports.figures import COLOURS, FAINT, INK, LINE, NAME, blank
from te_bench.reports.rows import Group

HATCHES = ("", "//", "..", "xx")
REST = "rest"  # the iteration as measured, less its kernels under the profiler: gaps, and clocks that sink under load


def breakdowns(group: Group) -> list[tuple[str, Callable[[], Figure]]]:
    """(variant, figure): stacked bars of milliseconds by kind of kernel; rungs without a profile are one plain bar."""
    return [
        (variant.name, lambda shown=shown: _stacked(shown))  # type: ignore[misc]
        for variant in layers.variants(group)
        if (shown := [rung for rung in variant.rungs if rung.latency_s])
    ]


def _parts(rung: Rung) -> dict[str, float]:
    """{kind: milliseconds}, what is left of the measured time as rest; without a profile all of it is `other`."""
    assert rung.latency_s is not None
    measured = rung.latency_s * 1e3
    parts = {kind: seconds * 1e3 for kind, seconds in layers.by_kind(rung.cell).items()}
    if not parts:
        return {layers.OTHER: measured}
    busy = sum(parts.values())
    return {**parts, REST: max(measured - busy, 0.0)}


def _stacked(rungs: Sequence[Rung]) -> Figure:
    kinds = [name for name, _ in layers.KINDS] + [layers.OTHER]
    figure = blank(0.95 + 0.42 * len(rungs))
    axes = figure.subplots()
    longest = 0.0
    for row, rung in enumerate(rungs):
        axes.text(0, row, text.shortened(rung.cell.label, NAME), va="center", fontsize=8.8)
        parts, left = _parts(rung), 0.0
        for place, kind in enumerate(kinds):
            style: Any = {
                "color": COLOURS[place],
                "hatch": HATCHES[place % len(HATCHES)],
                "edgecolor": "white",
                "linewidth": 0,
            }
            axes.barh(row + 0.45, parts.get(kind, 0.0), height=0.42, left=left, **style)
            left += parts.get(kind, 0.0)
        rest = parts.get(REST, 0.0)
        axes.barh(row + 0.45, rest, height=0.42, left=left, color="none", edgecolor=FAINT, linewidth=0.8)
        remark = f"{text.milliseconds(rung.latency_s)} ms" + (", baseline" if rung.is_baseline else "")
        end = left + rest
        shown = axes.annotate(remark, (end, row + 0.45), xytext=(5, 0), textcoords="offset points", va="center")
        shown.set_fontsize(8.8)
        shown.set_in_layout(False)
        longest = max(longest, end / (1 - (len(remark) + 2) / LINE))
    axes.set_ylim(len(rungs), -0.4)
    axes.set_xlim(0, longest)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ms forward and backward")
    handles = [
        Patch(facecolor=COLOURS[place], hatch=HATCHES[place % len(HATCHES)], edgecolor="white", linewidth=0, label=kind)
        for place, kind in enumerate(kinds)
    ]
    handles.append(Patch(facecolor="none", edgecolor=FAINT, linewidth=0.8, label=REST))
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    for words in legend.get_texts():
        words.set_color(INK)
    return figure
