"""Stacked bars of milliseconds by kind of kernel, names above, what was measured beside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from te_bench.reports.page.figures import COLOURS, FAINT, INK, LINE, ROW, blank, named, stack

HATCHES = ("", "//", "..", "xx")
REST = "rest"  # the time as measured, less the kernels under the profiler: gaps, and clocks that sink under load


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One bar: milliseconds of its kinds and of the rest, and a remark at its end."""

    name: str
    parts: Mapping[str, float]
    remark: str
    rest: float = 0.0


def bars(stacks: Sequence[Stack], kinds: Sequence[str], unit: str) -> Figure:
    """Parts in the order of `kinds`, the rest as an empty box."""
    places, rows = stack([one.name for one in stacks])
    figure = blank(0.95 + ROW * rows)
    axes = figure.subplots()
    longest = 0.0
    for one, place in zip(stacks, places, strict=True):
        middle = place + named(axes, one.name, place)
        left = 0.0
        for number, kind in enumerate(kinds):
            width = one.parts.get(kind, 0.0)
            axes.barh(middle, width, height=0.42, left=left, **_style(number))
            left += width
        axes.barh(middle, one.rest, height=0.42, left=left, color="none", edgecolor=FAINT, linewidth=0.8)
        end = left + one.rest
        shown = axes.annotate(one.remark, (end, middle), xytext=(5, 0), textcoords="offset points", va="center")
        shown.set_fontsize(8.8)
        shown.set_in_layout(False)
        longest = max(longest, end / (1 - (len(one.remark) + 2) / LINE))
    axes.set_ylim(rows, -0.4)
    axes.set_xlim(0, longest)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(unit)
    handles = [Patch(label=kind, **_style(place)) for place, kind in enumerate(kinds)]
    handles.append(Patch(facecolor="none", edgecolor=FAINT, linewidth=0.8, label=REST))
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    for words in legend.get_texts():
        words.set_color(INK)
    return figure


def _style(place: int) -> dict[str, Any]:
    colour, hatch = COLOURS[place], HATCHES[place % len(HATCHES)]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
