"""Draw the figures of attention alone: rates by family of shapes, and errors by where q is scaled."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from te_bench.reports.analysis.measures import median
from te_bench.reports.analysis.rows import grouped
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.bars import Bar, bar_panels
from te_bench.reports.page.drawing import COLOURS, FAINT, INK, MARKERS, NAME, blank, legend_below, without_y

SHAPES = 8  # of a figure at most
HATCHES = ("", "//", "xx", "..", "\\\\", "++")


def times(result: GroupResult) -> dict[str, Figure]:
    """Return {family of shapes: TFLOP/s of both passes}: at most SHAPES shapes each, both passes' fastest kernel first."""
    measured = [time for time in result.attention.times if time.forward_flop_per_s or time.backward_flop_per_s]
    names = list(dict.fromkeys(time.configuration.label for time in result.attention.times))
    return {
        family + (f", {first // SHAPES + 1}" if first else ""): _family(result, shapes[first : first + SHAPES], names)
        for family, found in grouped(measured, lambda time: _family_of(time.configuration.trial.problem)).items()
        for shapes in [list(dict.fromkeys(time.configuration.shape for time in found))]
        for first in range(0, len(shapes), SHAPES)
    }


def _family_of(problem: Mapping[str, Any]) -> str:
    """Return what shapes of one figure have in common: heads of 64 that share keys, causal."""
    shares = " that share keys" if problem.get("kv_heads", problem.get("heads")) != problem.get("heads") else ""
    changes = {"window_left": "window", "documents": "packed", "dropout": "dropout"}
    words = [word for key, word in changes.items() if problem.get(key)]
    words = words or ["causal" if problem.get("causal") else "full"]
    return f"heads of {problem.get('head_dim')}{shares}, {', '.join(words)}"


def _family(result: GroupResult, shapes: Collection[str], names: Sequence[str]) -> Figure:
    panels: dict[str, list[Bar]] = {"Forward, TFLOP/s": [], "Backward, TFLOP/s": []}
    for shape in shapes:
        alike = [time for time in result.attention.times if time.configuration.shape == shape]
        heading = shape
        for time in sorted(alike, key=lambda time: time.both_s or math.inf):
            place = names.index(time.configuration.label)
            look: dict[str, Any] = {"colour": COLOURS[place % len(COLOURS)], "hatch": HATCHES[place % len(HATCHES)]}
            outcome = time.configuration.outcome
            rates = (time.forward_flop_per_s, time.backward_flop_per_s)
            for panel, rate in zip(panels.values(), rates, strict=True):
                remark = outcome if rate is None and outcome != "ok" else text.tera(rate)
                value = None if rate is None else rate / text.TERA
                panel.append(Bar(name=time.configuration.label, value=value, remark=remark, heading=heading, **look))
            heading = ""
    return bar_panels(panels)


def scaling_errors(result: GroupResult) -> Figure | None:
    """Return every draw's largest relative error with q scaled before or after QK^T, and SDPA's; None if unmeasured."""
    found = [n for n in result.scaling_errors if n.before or n.after or n.sdpa]
    if not found:
        return None
    names = [text.folded(f"{n.configuration.shape}, {n.configuration.label}", NAME) for n in found]
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
            middle = median(draws)
            if middle is not None:
                axes.plot([middle], [y], MARKERS[place], color=COLOURS[place], markersize=6, mec=INK, mew=0.7)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: text.scientific(value))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(len(found) - 0.4, -0.6)
    without_y(axes)
    axes.grid(axis="x", color=FAINT, alpha=0.25, linewidth=0.6)
    axes.set_xlabel("largest relative error against FP64 (outlined: median of the draws)")
    handles = [
        Line2D([], [], color=COLOURS[i], marker=MARKERS[i], linestyle="", markersize=6, label=label)
        for i, (label, _) in enumerate(series)
    ]
    legend_below(figure, handles, 3)
    return figure
