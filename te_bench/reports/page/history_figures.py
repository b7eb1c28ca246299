"""Draw the history of each family: a panel for each series, over the same commits, with levels and changes."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from te_bench.reports.history.series import History, HistoryPoint, TimeSeries
from te_bench.reports.page import text
from te_bench.reports.page.drawing import COLOURS, FAINT, INK, NAME, Drawing, blank, draw, styled

PANELS = 8  # of one figure; more series get further figures
_LABELS = 12  # labels of commits that fit below the axis


@styled
def of_history(history: History) -> list[Drawing]:
    """Return the figures of every family, with at most eight series each; names are history-1, history-2 and so on."""
    drawings: list[Drawing] = []
    for (family, where), series in history.families().items():
        parts = [series[at : at + PANELS] for at in range(0, len(series), PANELS)]
        for number, part in enumerate(parts, start=1):
            caption = f"{family}{f', part {number} of {len(parts)}' if len(parts) > 1 else ''}"
            name = f"history-{len(drawings) + 1}"
            drawings.append(draw(name, "history", caption, f"{caption}: time over commits on {where}", figure(part)))
    return drawings


def figure(series: Sequence[TimeSeries]) -> Figure:
    """Return milliseconds over commits, a panel for each series; lines are levels, dashes with sizes are changes."""
    order = _order(series)
    drawn = blank(0.9 + 1.15 * len(series))
    panels = drawn.subplots(len(series), 1, sharex=True, squeeze=False)[:, 0]
    for axes, one in zip(panels, series, strict=True):
        _panel(axes, one, order)
    last = panels[-1]
    step = max(1, -(-len(order) // _LABELS))
    last.set_xticks(range(0, len(order), step), [point.commit for point in order[::step]], rotation=45, ha="right")
    last.tick_params(axis="x", labelsize=7.5)
    last.set_xlim(-0.6, len(order) - 0.4)
    last.set_xlabel("commit, in order of time")
    drawn.supylabel("ms", fontsize=9.5)
    handles = [
        Line2D([], [], color=COLOURS[0], marker="o", linestyle="", markersize=4, label="median over processes"),
        Line2D([], [], color=INK, linewidth=1.4, label="level"),
        Line2D([], [], color=COLOURS[1], linestyle="--", linewidth=1.1, label="change (shaded: where it may lie)"),
    ]
    drawn.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return drawn


def _order(series: Sequence[TimeSeries]) -> list[HistoryPoint]:
    """Return the points of all series in order of time, one for each run and environment."""
    points = {point.place: point for one in series for point in one.points}
    return sorted(points.values(), key=lambda point: point.order)


def _panel(axes: Axes, one: TimeSeries, order: Sequence[HistoryPoint]) -> None:
    places = {point.place: place for place, point in enumerate(order)}
    x = [places[point.place] for point in one.points]
    axes.plot(x, [point.seconds * 1e3 for point in one.points], "o", color=COLOURS[0], markersize=3.5)
    bounds = one.found.bounds[:-1], one.found.bounds[1:]
    levels = (
        zip(one.found.levels, *bounds, strict=True) if one.found.noise is not None else ()
    )  # only of what is searched
    for level, start, end in levels:
        axes.plot([x[start] - 0.4, x[end - 1] + 0.4], [level * 1e3] * 2, color=INK, linewidth=1.4)
    for change in one.changes:
        axes.axvspan(x[change.first - 1] + 0.5, x[change.last] - 0.5, color=COLOURS[1], alpha=0.18, linewidth=0)
        axes.axvline(x[change.index] - 0.5, color=COLOURS[1], linestyle="--", linewidth=1.1)
        size = axes.annotate(
            percent_change(change.ratio),
            (x[change.index] - 0.5, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(3, -2),
            textcoords="offset points",
        )
        size.set(va="top", fontsize=7.8)
    axes.set_title("\n".join(text.folded(one.name, NAME)), loc="left", fontsize=8.8)
    axes.margins(y=0.25)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)


def percent_change(ratio: float) -> str:
    """Return how much longer it takes after a change: +5.1 %."""
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "−")
