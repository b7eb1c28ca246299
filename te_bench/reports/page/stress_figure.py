"""The figure of a learning-rate ladder: every run's final loss against its learning rate."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from te_bench.reports.convergence.stress import StressLadder
from te_bench.reports.page import text
from te_bench.reports.page.drawing import COLOURS, FAINT, INK, MARKERS, NAME, blank, legend_below


def finals(ladder: StressLadder) -> Figure | None:
    """A mark a run, their means a line, a precision beside the other; None where no run came to its end."""
    shown = [(name, found) for name, found in ladder.results.items() if any(result.finals for result in found.values())]
    if not shown:
        return None
    names = ["\n".join(text.folded(name, NAME)) for name, _ in shown]
    drawn = blank(3.2 + 0.19 * sum(name.count("\n") + 1 for name in names))
    axes = drawn.subplots()
    for place, (_, found) in enumerate(shown):
        beside = 1.07 ** (place - (len(shown) - 1) / 2)  # so that marks of one rate do not hide each other
        style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        means = [(factor, result.final) for factor, result in found.items() if result.final is not None]
        axes.plot(
            [ladder.rate * f * beside for f, _ in means], [mean for _, mean in means], linewidth=1.4, ms=0, **style
        )
        each = [(factor, one) for factor, result in found.items() for one in result.finals]
        axes.plot(
            [ladder.rate * f * beside for f, _ in each],
            [one for _, one in each],
            linestyle="",
            ms=4,
            alpha=0.55,
            **style,
        )
    axes.set_xscale("log")
    axes.set_xticks(
        [ladder.rate * factor for factor in ladder.factors], [f"{ladder.rate * f:g}" for f in ladder.factors]
    )
    axes.minorticks_off()
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("final validation loss, nat")
    axes.grid(color=FAINT, alpha=0.25, linewidth=0.6)
    handles = [
        Line2D([], [], color=COLOURS[n % len(COLOURS)], marker=MARKERS[n % len(MARKERS)], markersize=4, label=name)
        for n, name in enumerate(names)
    ]
    if ladder.limits:
        broken: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": ":"}
        axes.plot([ladder.rate * factor for factor in ladder.limits], list(ladder.limits.values()), **broken)
        handles.append(Line2D([], [], label="above it a run is broken, in the mean over seeds", **broken))
    legend_below(drawn, handles, 1, left=True)
    return drawn
