"""Draw loss curves, validation above training, in frames that show what differs; and learning-rate ladders."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from te_bench.reports.analysis.curves import LossPoint, Training, TrainingComparison
from te_bench.reports.analysis.measures import quantile
from te_bench.reports.convergence.stress import StressLadder
from te_bench.reports.page import text
from te_bench.reports.page.drawing import COLOURS, FAINT, INK, NAME, blank, legend_below, line_style

DASHES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")
SMOOTH = 60  # points of a drawn training loss: each is a mean over neighbouring steps
NEAR = 0.15  # a loss against time is drawn from where it is within this share of its end
BESIDE = ("aa", "broken")  # arms of a study that only show that it works


def losses(comparison: TrainingComparison, axis: str) -> Figure | None:
    """Return loss against "step" or "time_s": validation with the bf16 seeds' band, and training below; None if empty.

    Against time the last part is drawn, without A/A, which lies on bf16, and without a study's planted fault.
    """
    drawn = [training for training in comparison.trainings if training.validation or training.train]
    part: Callable[[Sequence[LossPoint]], Sequence[LossPoint]] = list
    if axis == "time_s":
        drawn = [one for one in drawn if one.configuration.trial.problem.get("arm") not in BESIDE]
        part = _last_part
    if not drawn:
        return None
    series: dict[str, list[Sequence[LossPoint]]] = {
        "validation loss": [part(training.validation) for training in drawn],
        "training loss": [part(_smoothed(training.train)) for training in drawn],
    }
    shown = {what: found for what, found in series.items() if any(found)}
    figure = blank(0.8 + 2.1 * len(shown))
    panels = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    handles: list[Line2D | Patch] = []
    above: list[list[str]] = [[] for _ in drawn]
    notes: list[str] = []
    for axes, (what, found) in zip(panels, shown.items(), strict=True):
        seeds = []
        if (reference := comparison.reference) and what == "validation loss":
            seeds = [p for p in part(reference.validation) if p.deviation is not None]
            handles += _band(axes, seeds, reference.n, axis)
        top = _focus(axes, [[p.mean for p in each] for each in found if each], [p.low for p in seeds])
        for place, each in enumerate(found):
            axes.plot(_x(each, axis), [p.mean for p in each], **_line(place, len(each)))
            above[place] += [what] if each and min(p.mean for p in each) > top else []
        axes.set_ylabel(what)
        axes.grid(color=FAINT, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        if top < math.inf:
            first = max(each[0].mean for each in found if each)
            notes.append(f"{what}: its first fall, from {first:.3g}, is above the frame")
    panels[-1].set_xlabel("step" if axis == "step" else "training time, s")
    for place, (training, whats) in enumerate(zip(drawn, above, strict=True)):
        panel = "" if len(whats) == len(shown) else "".join(f"{what} " for what in whats)
        folded = text.folded(_legend_name(training) + (f", {panel}above the frame" if whats else ""), NAME)
        handles.append(Line2D([], [], label="\n".join(folded), **_line(place, 1)))
    if part is _last_part:
        notes.append(f"each from where it is within {100 * NEAR:g} % of its end")
    if any(len(training.train) > SMOOTH for training in drawn):
        notes.append(f"training loss: means over 1/{SMOOTH} of the training each")
    handles += [Line2D([], [], linestyle="", label=note) for note in notes]
    lines = sum(str(handle.get_label()).count("\n") + 1 for handle in handles)
    figure.set_figheight(figure.get_figheight() + 0.19 * (lines + 1))
    legend_below(figure, handles, 1, left=True)
    return figure


def _smoothed(points: Sequence[LossPoint]) -> list[LossPoint]:
    """Return at most SMOOTH points, each the mean of as many neighbours, because noise of single steps hides the curve."""
    each = math.ceil(len(points) / SMOOTH) or 1
    return [_mean_point(points[i : i + each]) for i in range(0, len(points), each)]


def _last_part(points: Sequence[LossPoint]) -> Sequence[LossPoint]:
    """Return the points from the first that is within NEAR of the last, two at least."""
    near = (place for place, p in enumerate(points) if p.mean <= (1 + NEAR) * points[-1].mean)
    return points[min(next(near, 0), max(0, len(points) - 2)) :]


def _mean_point(points: Sequence[LossPoint]) -> LossPoint:
    step, time_s, mean, low, high = (
        statistics.fmean(getattr(p, name) for p in points) for name in ("step", "time_s", "mean", "low", "high")
    )
    return LossPoint(step=step, time_s=time_s, mean=mean, low=low, high=high, deviation=None)


def _focus(axes: Axes, series: Sequence[Sequence[float]], lows: Sequence[float]) -> float:
    """Cut off the first steep fall if it takes more than half of the frame, and return the frame's top, or infinity.

    The frame holds `lows`, the lower ends of a band. A curve that has entered the frame stays inside, even if it rises
    again. A curve above all others may stay outside.
    """
    means = [mean for each in series for mean in each]
    lowest, upper = min([*means, *lows]), quantile(means, 0.75) or 0.0
    entered = [(each, next((i for i, mean in enumerate(each) if mean <= upper), len(each))) for each in series]
    upper = max([upper, *(mean for each, start in entered for mean in each[start:])])
    if not max(means) - upper > upper - lowest > 0:
        return math.inf
    room = 0.08 * (upper - lowest)
    axes.set_ylim(lowest - room, upper + room)
    return upper + room


def _x(points: Sequence[LossPoint], axis: str) -> list[float]:
    return [point.step if axis == "step" else point.time_s for point in points]


def _band(axes: Axes, points: Sequence[LossPoint], seeds: int, axis: str) -> list[Patch]:
    """Draw smallest to largest and mean +- deviation over the reference's seeds; return legend patches, [] for no points."""
    if not points:
        return []
    x = _x(points, axis)
    deviations = [p.deviation or 0.0 for p in points]
    axes.fill_between(x, [p.low for p in points], [p.high for p in points], color=COLOURS[0], alpha=0.15, linewidth=0)
    above = [p.mean + d for p, d in zip(points, deviations, strict=True)]
    below = [p.mean - d for p, d in zip(points, deviations, strict=True)]
    axes.fill_between(x, below, above, color=COLOURS[0], alpha=0.25, linewidth=0)
    return [
        Patch(facecolor=COLOURS[0], alpha=0.15, linewidth=0, label=f"bf16, {seeds} seeds: smallest to largest"),
        Patch(facecolor=COLOURS[0], alpha=0.4, linewidth=0, label="bf16: mean ± standard deviation"),
    ]


def _line(place: int, points: int) -> dict[str, Any]:
    return {
        **line_style(place),
        "linestyle": DASHES[place // len(COLOURS) % len(DASHES)],
        "linewidth": 1.5,
        "markersize": 4,
        "markevery": max(1, points // 12),
    }


def _legend_name(training: Training) -> str:
    seeds = len(training.configuration.ok)
    mean, diverged = f" (mean of {seeds})" if seeds > 1 else "", " (diverged)" if training.diverged else ""
    return f"{training.configuration.label}{mean}{diverged}"


def finals(ladder: StressLadder) -> Figure | None:
    """Return final losses: a mark for each run, lines for means, precisions side by side; None if no run ended."""
    shown = [(name, found) for name, found in ladder.results.items() if any(result.finals for result in found.values())]
    if not shown:
        return None
    names = ["\n".join(text.folded(name, NAME)) for name, _ in shown]
    drawn = blank(3.2 + 0.19 * sum(name.count("\n") + 1 for name in names))
    axes = drawn.subplots()
    for place, (_, found) in enumerate(shown):
        beside = 1.07 ** (place - (len(shown) - 1) / 2)  # marks of one rate stand side by side
        style = line_style(place)
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
    handles = [Line2D([], [], markersize=4, label=name, **line_style(place)) for place, name in enumerate(names)]
    if ladder.limits:
        broken: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": ":"}
        axes.plot([ladder.rate * factor for factor in ladder.limits], list(ladder.limits.values()), **broken)
        handles.append(Line2D([], [], label="above it a run is broken, in the mean over seeds", **broken))
    legend_below(drawn, handles, 1, left=True)
    return drawn
