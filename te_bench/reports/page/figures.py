"""The report's figures as SVG and PNG, the same bytes for the same records; colours that colour-blind readers can tell.

A figure is 5.2 inches wide, so that its text can still be read when a telephone shows it 370 pixels wide: names stand
above their bars, not beside them. Hatches and markers say again what colours say.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from te_bench.reports.analysis import measures
from te_bench.reports.analysis.rows import Cell, Group
from te_bench.reports.page import text

WIDTH = 5.2  # inches
LINE = 68  # characters that fit in the width
NAME = 64  # of a line of a configuration's name above its bar
ROW, NAME_LINE, HEADING, NAMELESS = (
    0.42,
    0.36,
    0.72,
    0.6,
)  # inches of a bar with its name; what else takes, in such rows
INK = "#1b1f24"  # text and axes; becomes currentColor where the SVG is inlined
WHITE = "fill: #ffffff"  # the ground of a file, first of all that is drawn
FAINT = "#8a9099"  # grid and what is secondary; readable on white and on the page's dark ground

# Okabe and Ito, Color Universal Design (2008), without the yellow, which vanishes on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a9099")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PRECISION = {"fp32": "#8a9099", "fp16": "#009e73", "bf16": "#0072b2", "fp8": "#d55e00"}
HATCH = {"eager": "", "compile": "//", "compile-reduce-overhead": "xx", "cudagraph": "\\\\"}

_STYLE: Any = {  # matplotlib 3.11 types the keys, 3.9 does not
    "font.family": "DejaVu Sans",  # matplotlib brings it: the same widths on every machine
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "te-bench",
    "text.parse_math": False,  # a $ in a name is a $
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A figure by name: `inline` is the SVG for a page, `svg` and `png` are files; `alt` says what is to be seen."""

    name: str
    kind: str
    caption: str
    alt: str
    inline: str
    svg: bytes
    png: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar with its name above it, "" for a remark that names it; `value` None draws the remark alone."""

    name: str
    value: float | None
    remark: str
    low: float | None = None
    high: float | None = None
    outline: float | None = None  # a second, larger quantity, drawn as an empty bar around
    colour: str = COLOURS[0]
    hatch: str = ""
    heading: str = ""  # starts a block of bars


def draw(name: str, kind: str, caption: str, where: str, build: Callable[[], Figure]) -> Drawing:
    """Render a figure for the page (transparent, text in the page's colour) and as files (on white)."""
    alt = f"{caption}: {where}"
    with mpl.rc_context(_STYLE):
        figure = build()
        svg, png = (_saved(figure, kind_of_file) for kind_of_file in ("svg", "png"))
    inline = _inlined(svg.decode().replace(f'style="{WHITE}"', 'style="fill: none"', 1), name, alt)
    return Drawing(name=name, kind=kind, caption=caption, alt=alt, inline=inline, svg=svg, png=png)


def _saved(figure: Figure, file_format: str) -> bytes:
    for axes in figure.axes:
        axes.set_facecolor("none")
    stream = io.BytesIO()
    undated = {"Date": None, "Creator": None} if file_format == "svg" else {"Software": None}
    figure.savefig(stream, format=file_format, facecolor="white", metadata=undated)
    return stream.getvalue()


def _inlined(svg: str, name: str, alt: str) -> str:
    """The svg element alone, its ids made the page's only ones, its ink the page's text colour."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<style type=\"text/css\">.*?</style>", "", body, flags=re.DOTALL)  # the page's own says it
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = body.replace(INK, "currentColor")
    label = alt.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return body.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def blank(height: float) -> Figure:
    """A figure of the page's width, `height` inches high, to draw on."""
    return Figure(figsize=(WIDTH, height), dpi=200, layout="constrained")


def bars(drawn: Sequence[Bar], unit: str, legend: Sequence[Patch] = ()) -> Figure:
    """Horizontal bars, names above, remarks after; whiskers where low and high are known."""
    columns = 2 if len(legend) < 7 else 3
    places, rows = stack([bar.name for bar in drawn], [bar.heading for bar in drawn])
    figure = blank(0.55 + ROW * rows + 0.22 * math.ceil(len(legend) / columns))
    axes = figure.subplots()
    extent = max([v for bar in drawn for v in (bar.value, bar.high, bar.outline) if v is not None], default=1.0) or 1.0
    for bar, place in zip(drawn, places, strict=True):
        if bar.heading:
            axes.text(0, place - HEADING + 0.12, bar.heading, va="center", weight="bold")
        _bar(axes, bar, place + named(axes, bar.name, place))
    axes.set_ylim(rows, -0.4)
    axes.set_xlim(0, max([extent, *(_end(bar) / (1 - (len(bar.remark) + 2) / LINE) for bar in drawn)]))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(unit)
    if legend:
        figure.legend(handles=list(legend), loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    return figure


def stack(names: Sequence[str], headings: Sequence[str] = ()) -> tuple[list[float], float]:
    """Where the names of bars begin, one below the other, and where the last bar ends; in rows of ROW inches."""
    places, top = [], 0.0
    for name, heading in zip(names, headings or [""] * len(names), strict=True):
        top += HEADING if heading else 0.0
        places.append(top)
        top += 1 + NAME_LINE * (len(text.folded(name, NAME)) - 1) if name else NAMELESS
    return places, top


def named(axes: Axes, name: str, place: float) -> float:
    """Write a name from `place` down; how far below is its bar's middle."""
    if not name:
        return 0.05
    lines = text.folded(name, NAME)
    for i, line in enumerate(lines):
        axes.text(0, place + NAME_LINE * i, line, va="center", fontsize=8.8)
    return 0.45 + NAME_LINE * (len(lines) - 1)


def _bar(axes: Axes, bar: Bar, y: float) -> None:
    if bar.value is None:
        axes.text(0, y, bar.remark, va="center", style="italic", fontsize=8.8, color=FAINT)
        return
    if bar.outline is not None:
        axes.barh(y, bar.outline, height=0.42, color="none", edgecolor=bar.colour, linewidth=0.8, linestyle=(0, (3, 2)))
    axes.barh(y, bar.value, height=0.42, color=bar.colour, edgecolor="white", linewidth=0, hatch=bar.hatch)
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        axes.plot([bar.low, bar.high], [y, y], color=INK, linewidth=1.1, marker="|", markersize=5)
    remark = axes.annotate(bar.remark, (_end(bar), y), xytext=(5, 0), textcoords="offset points", va="center")
    remark.set_fontsize(8.8)
    remark.set_in_layout(False)  # set_xlim has left room for it


def _end(bar: Bar) -> float:
    return max(bar.value or 0.0, bar.high or 0.0, bar.outline or 0.0)


def _styled(cell: Cell) -> tuple[str, str]:
    trial = cell.trial
    return PRECISION.get(trial.precision, COLOURS[3]), HATCH.get(trial.mode, "++")


def _legend(cells: Sequence[Cell]) -> list[Patch]:
    """Colours of the precisions and hatches of the modes that occur, where there is more than one to tell apart."""
    precisions = [p for p in PRECISION if any(cell.trial.precision == p for cell in cells)]
    modes = [m for m in HATCH if any(cell.trial.mode == m for cell in cells)]
    patches = [Patch(facecolor=PRECISION[p], label=p) for p in precisions] if len(precisions) > 1 else []
    if len(modes) > 1:
        patches += [Patch(facecolor=FAINT, edgecolor="white", hatch=HATCH[m], linewidth=0, label=m) for m in modes]
    return patches


def ladder(group: Group) -> Callable[[], Figure] | None:
    """ms per step with the 5th to 95th percentile of the timed steps, and the speed-up over the baseline."""
    rungs = measures.ladder(group)
    if not any(rung.latency_s for rung in rungs):
        return None
    drawn = []
    for rung in rungs:
        colour, hatch = _styled(rung.cell)
        remark = rung.cell.outcome
        if rung.latency_s is not None:
            faster = "baseline" if rung.is_baseline else text.speedup(rung.speedup) if rung.speedup else ""
            remark = ", ".join(word for word in (f"{text.milliseconds(rung.latency_s)} ms", faster) if word)
        low, high, value = (None if v is None else v * 1e3 for v in (rung.low_s, rung.high_s, rung.latency_s))
        drawn.append(
            Bar(name=rung.cell.label, value=value, remark=remark, low=low, high=high, colour=colour, hatch=hatch)
        )
    return lambda: bars(drawn, "ms per step", _legend([r.cell for r in rungs]))


def memory(group: Group) -> Callable[[], Figure] | None:
    """Peak memory of a step, allocated as the bar and reserved as its outline; resident memory on a CPU."""
    drawn, on_host = [], False
    rungs = measures.ladder(group)
    for rung in rungs:
        value, outline = rung.peak_allocated, rung.peak_reserved
        if value is None and rung.peak_rss is not None:
            value, outline, on_host = rung.peak_rss, None, True
        if value is None:
            continue
        colour, hatch = _styled(rung.cell)
        inner, outer = (None if v is None else v / text.GIB for v in (value, outline))
        drawn.append(
            Bar(name=rung.cell.label, value=inner, outline=outer, remark=text.gib(value), colour=colour, hatch=hatch)
        )
    if not drawn:
        return None
    unit = "peak resident memory, GiB" if on_host else "peak memory, GiB (bar: allocated, outline: reserved)"
    return lambda: bars(drawn, unit, _legend([r.cell for r in rungs]))


def max_batch(group: Group) -> Callable[[], Figure] | None:
    """The largest batch that fits."""
    found = measures.max_batch(group)
    if not any(m.max_batch for m in found):
        return None
    drawn = []
    for m in found:
        colour, hatch = _styled(m.cell)
        remark = m.cell.outcome if m.max_batch is None else text.count(m.max_batch)
        drawn.append(Bar(name=m.cell.label, value=m.max_batch, remark=remark, colour=colour, hatch=hatch))
    return lambda: bars(drawn, "largest batch that fits, sequences", _legend([m.cell for m in found]))


def attention(group: Group, way: str) -> Callable[[], Figure] | None:
    """TFLOP/s of the forward or the backward pass, the kernels of a shape together, the fastest first."""

    def rate(rung: measures.AttentionRung) -> float | None:
        return rung.forward_flop_per_s if way == "forward" else rung.backward_flop_per_s

    rungs = measures.attention(group)
    if not any(map(rate, rungs)):
        return None
    names = list(dict.fromkeys(rung.cell.label for rung in rungs))
    drawn: list[Bar] = []
    for shape in dict.fromkeys(rung.cell.shape for rung in rungs):
        heading = shape
        for rung in sorted((r for r in rungs if r.cell.shape == shape), key=lambda r: -(rate(r) or 0.0)):
            value = None if (found := rate(rung)) is None else found / text.TERA
            outcome = rung.cell.outcome if value is None and rung.cell.outcome != "ok" else text.plain(value)
            name = text.shortened(rung.cell.label, NAME - len(outcome) - 2)
            place = names.index(rung.cell.label)
            colour, hatch = COLOURS[place % len(COLOURS)], ("", "//", "xx", "..", "\\\\", "++")[place % 6]
            remark = f"{outcome}, {name}" if value is not None else f"{name}: {outcome}"
            drawn.append(Bar(name="", value=value, remark=remark, colour=colour, hatch=hatch, heading=heading))
            heading = ""
    return lambda: bars(drawn, f"attention {way}, TFLOP/s")


def numerics(group: Group) -> Callable[[], Figure] | None:
    """Every draw's largest relative error: q scaled before QK^T, after it, and SDPA."""
    found = [n for n in measures.numerics(group) if n.before or n.after or n.sdpa]
    if not found:
        return None
    return lambda: _numerics(found)


def _numerics(found: Sequence[measures.Numerics]) -> Figure:
    names = [text.folded(f"{n.cell.shape}, {n.cell.label}", NAME) for n in found]
    lines = max(map(len, names))
    figure = blank(0.9 + (0.62 + 0.15 * (lines - 1)) * len(found))
    axes = figure.subplots()
    series = (("scaled before", "before"), ("scaled after", "after"), ("SDPA", "sdpa"))
    for row, n in enumerate(found):
        axes.text(0, row - 0.2, "\n".join(names[row]), va="bottom", fontsize=8.8, transform=axes.get_yaxis_transform())
        for place, (_, attribute) in enumerate(series):
            draws = [value for value in getattr(n, attribute) if value > 0]
            y = row + 0.16 * place
            axes.plot(draws, [y] * len(draws), MARKERS[place], color=COLOURS[place], markersize=4, alpha=0.45, mew=0)
            middle = measures.median(draws)
            if middle is not None:
                axes.plot([middle], [y], MARKERS[place], color=COLOURS[place], markersize=6, mec=INK, mew=0.7)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: text.scientific(value))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=FAINT, alpha=0.25, linewidth=0.6)
    axes.set_xlabel("largest relative error against FP64 (outlined: median of the draws)")
    handles = [
        Line2D([], [], color=COLOURS[i], marker=MARKERS[i], linestyle="", markersize=6, label=label)
        for i, (label, _) in enumerate(series)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return figure
