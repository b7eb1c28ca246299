"""The figure of steps over several GPUs: efficiency by their number."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from te_bench.reports.analysis.measures import Ratio
from te_bench.reports.analysis.scaled import ScaledStep
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page.drawing import COLOURS, FAINT, MARKERS, blank, legend_below

PANEL, REST = 1.75, 0.9  # inches of a panel, and of what is below all of them
LEAST = 80.0  # percent where the axis begins, or lower
APART = 0.02  # of a number of GPUs, so that intervals stand beside each other

Panels = Mapping[str, Mapping[str, Sequence[tuple[int, Ratio]]]]  # {way and mode: {configuration: its points}}


def efficiency(result: GroupResult) -> Figure | None:
    """Efficiency by number of GPUs, a panel for each way to divide a step and each mode."""
    panels: dict[str, dict[str, list[tuple[int, Ratio]]]] = {}
    for step in result.scaled:
        if step.efficiency is None or step.parallel is None or step.baseline is None:
            continue
        lines = panels.setdefault(f"{step.parallel}, {step.configuration.trial.mode}", {})
        lines.setdefault(_name(step, result.scaled), [(1, Ratio(value=1.0, n=1))]).append((step.world, step.efficiency))
    if not panels:
        return None
    return _efficiency(
        panels, "GPUs" if result.scaled[0].configuration.trial.device == "cuda" else "processes of a CPU"
    )


def _name(step: ScaledStep, steps: Sequence[ScaledStep]) -> str:
    """Recipe or precision, with the project, the attention and each rank's sequences where those differ."""
    trial = step.configuration.trial
    words = [step.project] if len({one.project for one in steps}) > 1 else []
    words += [trial.recipe or trial.precision]
    words += [trial.attention] if len({one.configuration.trial.attention for one in steps}) > 1 else []
    words += [f"{step.sequences:g} sequences"] if step.sequences and len({one.sequences for one in steps}) > 1 else []
    return ", ".join(words)


def _efficiency(panels: Panels, what: str) -> Figure:
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    points = [point for lines in panels.values() for line in lines.values() for point in line]
    figure = blank(REST + PANEL * len(panels) + 0.11 * len(names))
    several = figure.subplots(len(panels), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(several, sorted(panels.items()), strict=True):
        axes.axhline(100, color=FAINT, linewidth=0.8)
        for name, line in lines.items():
            _line(axes, line, names.index(name), APART * (names.index(name) - (len(names) - 1) / 2))
        axes.set_title(title, loc="left", fontsize=9.5, weight="bold")
        axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
        axes.set_ylabel("efficiency, %")
    worlds = sorted({world for world, _ in points})
    several[0].set_xscale("log", base=2)
    several[0].set_xticks(worlds, list(map(str, worlds)))
    several[0].minorticks_off()
    several[0].set_ylim(min([LEAST, *(100 * (one.low or one.value) - 5 for _, one in points)]), None)
    several[-1].set_xlabel(what)
    legend_below(figure, [Line2D([], [], label=name, **_style(place)) for place, name in enumerate(names)], 2)
    return figure


def _line(axes: Axes, line: Sequence[tuple[int, Ratio]], place: int, shift: float) -> None:
    style = _style(place)
    axes.plot([world * (1 + shift) for world, _ in line], [100 * one.value for _, one in line], **style)
    for world, one in line:
        if one.low is not None and one.high is not None:
            x = world * (1 + shift)
            axes.plot([x, x], [100 * one.low, 100 * one.high], color=style["color"], linewidth=1.1)


def _style(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)], "markersize": 5}
