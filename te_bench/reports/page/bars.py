"""Draw horizontal bars, plain or stacked, with names above them and remarks at their ends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from te_bench.reports.page import text
from te_bench.reports.page.drawing import COLOURS, FAINT, INK, LINE, NAME, blank, legend_below, without_y

#: ROW: inches of a bar with its name. The others are in rows.
ROW, NAME_LINE, HEADING = 0.42, 0.36, 1.0
HATCHES = ("", "//", "..", "xx")
REST = "rest"  # the measured time minus the profiled kernels: gaps, and clocks that fall under load


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar with its name above it; value: None draws only the remark."""

    name: str
    value: float | None
    remark: str
    low: float | None = None
    high: float | None = None
    outline: float | None = None  # a second, larger quantity, drawn as an empty bar around the first
    colour: str = COLOURS[0]
    hatch: str = ""
    heading: str = ""  # starts a block of bars


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One stacked bar: milliseconds of its kinds and of the rest, and a remark at its end."""

    name: str
    parts: Mapping[str, float]
    remark: str
    rest: float = 0.0


def bars(drawn: Sequence[Bar], unit: str, legend: Sequence[Patch] = ()) -> Figure:
    """Return horizontal bars, names above, remarks after; bars with low and high have whiskers."""
    columns = 2 if len(legend) < 7 else 3
    places, rows = places_of([bar.name for bar in drawn])
    figure = blank(0.55 + ROW * rows + 0.22 * math.ceil(len(legend) / columns))
    axes = figure.subplots()
    extent = max([v for bar in drawn for v in (bar.value, bar.high, bar.outline) if v is not None], default=1.0) or 1.0
    for bar, place in zip(drawn, places, strict=True):
        _bar(axes, bar, place + write_name(axes, bar.name, place))
    axes.set_ylim(rows, -0.4)
    axes.set_xlim(0, max([extent, *(_with_remark(_end(bar), bar.remark) for bar in drawn)]))
    without_y(axes)
    axes.set_xlabel(unit)
    if legend:
        legend_below(figure, legend, columns)
    return figure


def bar_panels(panels: Mapping[str, Sequence[Bar]]) -> Figure:
    """Return panels {title: bars} side by side, with one scale; the first one's names and headings are for all."""
    first = next(iter(panels.values()))
    places, rows = places_of([bar.name for bar in first], [bar.heading for bar in first])
    figure = blank(0.5 + ROW * rows)
    several = figure.subplots(ncols=len(panels), sharex=True, squeeze=False)[0]
    for bar, place in zip(first, places, strict=True):
        if bar.heading:
            shown = several[0].text(0, place - HEADING / 2, bar.heading, va="center", weight="bold")
            shown.set_in_layout(False)  # headings and names reach over the next panel
    ends = [_with_remark(_end(bar), bar.remark, LINE / len(panels)) for drawn in panels.values() for bar in drawn]
    for number, (axes, (title, drawn)) in enumerate(zip(several, panels.items(), strict=True)):
        for bar, own, place in zip(drawn, first, places, strict=True):
            _bar(axes, bar, place + write_name(axes, own.name, place, shown=number == 0))
        axes.set_ylim(rows, 0)
        axes.set_xlim(0, max(ends) or 1.0)
        without_y(axes)
        axes.set_title(title, loc="left", fontsize=9.5)
    return figure


def places_of(names: Sequence[str], headings: Sequence[str] = ()) -> tuple[list[float], float]:
    """Return where the names of bars begin, one below the other, and where the last bar ends; in rows of ROW inches."""
    places, top = [], 0.0
    for name, heading in zip(names, headings or [""] * len(names), strict=True):
        top += HEADING if heading else 0.0
        places.append(top)
        top += 1 + NAME_LINE * (len(text.folded(name, NAME)) - 1)
    return places, top


def write_name(axes: Axes, name: str, place: float, *, shown: bool = True) -> float:
    """Write a name from `place` down, and return how far below its bar's middle is; shown: False only measures it."""
    lines = text.folded(name, NAME)
    for i, line in enumerate(lines if shown else ()):
        axes.text(0, place + NAME_LINE * i, line, va="center", fontsize=8.8).set_in_layout(False)
    return 0.45 + NAME_LINE * (len(lines) - 1)


def _bar(axes: Axes, bar: Bar, y: float) -> None:
    if bar.value is None:
        axes.text(0, y, bar.remark, va="center", style="italic", fontsize=8.8)
        return
    if bar.outline is not None:
        axes.barh(y, bar.outline, height=0.42, color="none", edgecolor=bar.colour, linewidth=0.8, linestyle=(0, (3, 2)))
    axes.barh(y, bar.value, height=0.42, color=bar.colour, edgecolor="white", linewidth=0, hatch=bar.hatch)
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        axes.plot([bar.low, bar.high], [y, y], color=INK, linewidth=1.1, marker="|", markersize=5)
    _write_remark(axes, bar.remark, _end(bar), y)


def _end(bar: Bar) -> float:
    return max(bar.value or 0.0, bar.high or 0.0, bar.outline or 0.0)


def _write_remark(axes: Axes, remark: str, end: float, y: float) -> None:
    shown = axes.annotate(remark, (end, y), xytext=(5, 0), textcoords="offset points", va="center")
    shown.set_fontsize(8.8)
    shown.set_in_layout(False)  # set_xlim leaves room for it


def _with_remark(end: float, remark: str, line: float = LINE) -> float:
    """Return how far the frame must reach for a remark at `end`; line: the characters that fit in its width."""
    return end / (1 - (len(remark) + 2) / line)


def stacked_bars(stacks: Sequence[Stack], kinds: Sequence[str], unit: str) -> Figure:
    """Return stacked bars: parts in the order of `kinds`, the rest as an empty box."""
    places, rows = places_of([one.name for one in stacks])
    figure = blank(0.95 + ROW * rows)
    axes = figure.subplots()
    longest = 0.0
    for one, place in zip(stacks, places, strict=True):
        middle = place + write_name(axes, one.name, place)
        left = 0.0
        for number, kind in enumerate(kinds):
            width = one.parts.get(kind, 0.0)
            axes.barh(middle, width, height=0.42, left=left, **_part_style(number))
            left += width
        axes.barh(middle, one.rest, height=0.42, left=left, color="none", edgecolor=FAINT, linewidth=0.8)
        end = left + one.rest
        _write_remark(axes, one.remark, end, middle)
        longest = max(longest, _with_remark(end, one.remark))
    axes.set_ylim(rows, -0.4)
    axes.set_xlim(0, longest)
    without_y(axes)
    axes.set_xlabel(unit)
    handles = [Patch(label=kind, **_part_style(place)) for place, kind in enumerate(kinds)]
    handles.append(Patch(facecolor="none", edgecolor=FAINT, linewidth=0.8, label=REST))
    legend_below(figure, handles, 3)
    return figure


def _part_style(place: int) -> dict[str, Any]:
    colour, hatch = COLOURS[place], HATCHES[place % len(HATCHES)]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
