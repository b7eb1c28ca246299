"""Draw the figure of steps over several GPUs: the speed of each GPU by their number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from te_bench.reports.analysis.measures import Ratio
from te_bench.reports.analysis.scaled import ScaledStep
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page.drawing import FAINT, blank, legend_below, line_style

PANEL, REST = 1.75, 0.9  # inches of a panel, and of the space below all panels
APART = 0.02  # shift of points, as a share of their number of GPUs, so that intervals do not overlap
LONG = 30  # characters of a name up to which two names fit side by side below a figure
LABEL = 0.13  # of a panel's height: a line of text


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Thousand tokens a second of one of `world` GPUs, and its efficiency if the step was timed on one GPU."""

    world: int
    speed: float
    efficiency: Ratio | None


Panels = Mapping[str, Mapping[str, Sequence[Point]]]  # {way and mode: {configuration: its points}}


def throughput(result: GroupResult) -> Figure | None:
    """Return tokens a second of each GPU by their number, a panel for each kind of parallelism and mode."""
    panels: dict[str, dict[str, list[Point]]] = {}
    for step in result.scaled:
        if not step.tokens_per_s or step.parallel is None:
            continue
        speed = step.tokens_per_s / 1e3
        panel = panels.setdefault(f"{step.parallel}, {step.configuration.trial.mode}", {})
        line = panel.setdefault(_name(step, result.scaled), [])
        if step.efficiency and not line:
            line.append(Point(world=1, speed=speed / step.efficiency.value, efficiency=Ratio(value=1.0, n=1)))
        line.append(Point(world=step.world, speed=speed, efficiency=step.efficiency))
    if not panels:
        return None
    return _throughput(
        panels, "GPUs" if result.scaled[0].configuration.trial.device == "cuda" else "processes of a CPU"
    )


def _name(step: ScaledStep, steps: Sequence[ScaledStep]) -> str:
    """Return recipe or precision, and where they differ project, fused blocks, attention and each rank's sequences."""
    trial = step.configuration.trial
    words = [step.project] if len({one.project for one in steps}) > 1 else []
    words += [trial.recipe or trial.precision]
    words += ["fused"] if trial.problem.get("blocks") == "fused" else []
    words += [trial.attention] if len({one.configuration.trial.attention for one in steps}) > 1 else []
    words += [f"{step.sequences:g} sequences"] if step.sequences and len({one.sequences for one in steps}) > 1 else []
    return ", ".join(words)


def _throughput(panels: Panels, what: str) -> Figure:
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    top = 1.1 * max(point.speed for lines in panels.values() for line in lines.values() for point in line)
    columns = 2 if max(map(len, names)) <= LONG else 1
    figure = blank(REST + PANEL * len(panels) + 0.2 * len(names) / columns)
    several = figure.subplots(len(panels), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(several, sorted(panels.items()), strict=True):
        for name, line in lines.items():
            _line(axes, line, names.index(name), APART * (names.index(name) - (len(names) - 1) / 2))
        _efficiencies(axes, [(line, names.index(name)) for name, line in lines.items()], top)
        axes.set_title(title, loc="left", fontsize=9.5, weight="bold")
        axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
        axes.set_ylabel("k tokens/s/GPU")
    worlds = sorted({point.world for lines in panels.values() for line in lines.values() for point in line})
    several[0].set_xscale("log", base=2)
    several[0].set_xticks(worlds, list(map(str, worlds)))
    several[0].set_xlim(worlds[0] * 0.9, worlds[-1] * 1.24)  # room for the last efficiencies
    several[0].minorticks_off()
    several[0].set_ylim(0, top)
    several[-1].set_xlabel(what)
    legend_below(figure, [Line2D([], [], label=name, **_style(place)) for place, name in enumerate(names)], columns)
    return figure


def _line(axes: Axes, line: Sequence[Point], place: int, shift: float) -> None:
    style = _style(place)
    xs = [point.world * (1 + shift) for point in line]
    axes.plot(xs, [point.speed for point in line], **style)
    for x, point in zip(xs, line, strict=True):
        one = point.efficiency
        if one and one.low is not None and one.high is not None:
            alone = point.speed / one.value
            axes.plot([x, x], [alone * one.low, alone * one.high], color=style["color"], linewidth=1.1)


def _efficiencies(axes: Axes, lines: Sequence[tuple[Sequence[Point], int]], top: float) -> None:
    """Write efficiencies at the ends of the lines, each beside its line's mark, far enough apart to be read."""
    ends = sorted(
        (line[-1].speed, line[-1].world, last.value, place) for line, place in lines if (last := line[-1].efficiency)
    )
    heights = apart([speed for speed, *_ in ends], LABEL * top, top)
    for (_, world, efficiency, place), height in zip(ends, heights, strict=True):
        text, where = f"{100 * efficiency:.0f} %", (world * 1.08, height)
        axes.plot(*where, **_style(place))
        axes.annotate(text, where, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.8)


def apart(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Return rising heights, moved as little as needed to be a gap apart and half a gap below the top."""
    found: list[float] = []
    for height in heights:
        found.append(max([height, *(below + gap for below in found[-1:])]))
    limit = top - gap / 2
    for place in reversed(range(len(found))):
        found[place] = min(found[place], limit)
        limit = found[place] - gap
    return found


def _style(place: int) -> dict[str, Any]:
    return {**line_style(place), "markersize": 5}
