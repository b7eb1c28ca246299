"""Draw the figures of attention alone: rates by shape, and errors by where q is scaled."""

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from te_bench.reports.analysis.attention import AttentionTime
from te_bench.reports.analysis.measures import median
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.bars import Bar, bars
from te_bench.reports.page.drawing import COLOURS, FAINT, INK, MARKERS, NAME, blank, legend_below, without_y


def times(result: GroupResult, way: str) -> Figure | None:
    """Return TFLOP/s of the forward or the backward pass, grouped by shape, the fastest first; None if unmeasured."""

    def rate(time: AttentionTime) -> float | None:
        return time.forward_flop_per_s if way == "forward" else time.backward_flop_per_s

    measured = result.attention.times
    if not any(map(rate, measured)):
        return None
    names = list(dict.fromkeys(time.configuration.label for time in measured))
    drawn: list[Bar] = []
    for shape in dict.fromkeys(time.configuration.shape for time in measured):
        heading = shape
        for time in sorted((r for r in measured if r.configuration.shape == shape), key=lambda r: -(rate(r) or 0.0)):
            value = None if (found := rate(time)) is None else found / text.TERA
            failed = value is None and time.configuration.outcome != "ok"
            outcome = time.configuration.outcome if failed else text.plain(value)
            name = text.shortened(time.configuration.label, NAME - len(outcome) - 2)
            place = names.index(time.configuration.label)
            colour, hatch = COLOURS[place % len(COLOURS)], ("", "//", "xx", "..", "\\\\", "++")[place % 6]
            remark = f"{outcome}, {name}" if value is not None else f"{name}: {outcome}"
            drawn.append(Bar(name="", value=value, remark=remark, colour=colour, hatch=hatch, heading=heading))
            heading = ""
    return bars(drawn, f"attention {way}, TFLOP/s")


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
