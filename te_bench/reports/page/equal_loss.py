"""Show the time to equal loss as a table and a figure: what a faster step is worth after the steps that it costs."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from te_bench.reports.analysis.curves import LossPoint, points
from te_bench.reports.convergence.study import StudyArm
from te_bench.reports.convergence.study_verdict import ArmVerdict, StudyVerdict
from te_bench.reports.page import text
from te_bench.reports.page.drawing import COLOURS, FAINT, INK, NAME, blank, legend_below
from te_bench.reports.page.table import Table, Value, number, speedup, table_of, word
from te_bench.reports.page.verdict_tables import within_hosts

SHOWN = 0.6  # the last share of bf16's training time; earlier, curves fall too steeply to show a gap
LEAST = 0.4  # at least this last share of each curve is shown


def times(found: StudyVerdict) -> Table | None:
    """Return the table of each recipe's speed-up to equal loss with its interval, and its two factors."""
    rows = [_row(finding, found) for finding in _timed(found)]
    whose = found.study.whose
    note = (
        f"To equal loss: how many times as fast a configuration comes to {whose} final loss, with a 95 % interval over "
        f"seeds. It is the speed-up of its step divided by the steps that it needs for one of {whose}. Where the learning "
        f"rate decays, the price of a gap in steps is an approximation. Intervals go from the smaller lower end to the "
        f"larger upper end of two: by the slope of {whose} loss in the last quarter of training, and in the last eighth."
    )
    return table_of("equal_loss", f"{found.study.title}: time to {whose} final loss", rows, note)


def _row(finding: ArmVerdict, found: StudyVerdict) -> dict[str, Value]:
    speed = finding.speedup
    assert speed is not None
    more, steps = speed.more_steps, float(found.study.arms[0].trial.problem["steps"] or 0)
    ends = speed.more_steps_interval
    return {
        "Configuration": word(finding.arm.name),
        "To equal loss": speedup(speed.to_equal_loss),
        "Step alone": within_hosts(None if speed.step_time is None else speed.step_time.inverse, speed),
        "More steps": number(None if more is None else more / steps, text.percent),
        "95 % of them": word(None if ends is None else f"[{100 * ends[0] / steps:.1f}, {100 * ends[1] / steps:.1f}] %"),
        "Why not": word(speed.reason),
    }


def _timed(found: StudyVerdict) -> list[ArmVerdict]:
    """Return the recipes with measured seconds; trials that shared a GPU have none."""
    return [finding for finding in found.recipes if finding.speedup is not None]


def figure(found: StudyVerdict) -> Figure | None:
    """Return validation loss against training time, each recipe beside bf16, seeds as bands; None without times."""
    drawn = [finding for finding in _timed(found) if finding.speedup and finding.speedup.step_time]
    if not drawn:
        return None
    whose, arms = found.study.whose, [finding.arm for finding in drawn]
    curves = [_curve(*found.study.beside(arms[0])), *map(_curve, arms)]
    if not curves[0]:
        return None
    drawing = blank(0.8 + 1.75 * len(drawn))
    panels = drawing.subplots(len(drawn), sharex=True, sharey=True, squeeze=False)[:, 0]
    end = curves[0][-1]
    begin = min((1 - SHOWN) * end.time_s, *((1 - LEAST) * curve[-1].time_s for curve in curves if curve))
    reference, *ours = ([p for p in curve if p.time_s >= begin] for curve in curves)
    for axes, finding, curve in zip(panels, drawn, ours, strict=True):
        _seeds(axes, reference, 0)
        _seeds(axes, curve, 1)
        axes.axhline(end.mean, color=FAINT, linewidth=0.8)
        _reached(axes, finding, end)
        axes.set_title("\n".join(text.folded(_title(finding), NAME)), loc="left", fontsize=8.8, pad=3)
        axes.grid(color=FAINT, alpha=0.25, linewidth=0.6)
    late = [p for curve in (reference, *ours) for p in curve]
    low, high = min(p.low for p in late), max(p.high for p in late)
    panels[0].set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    speedups = (finding.speedup for finding in drawn if finding.speedup is not None)
    reached = [(1 - share) * end.time_s for one in speedups for share in one.less_time_interval or ()]
    furthest = min(max(p.time_s for p in late) * 1.5, max([*reached, *(p.time_s for p in late)]))
    panels[0].set_xlim(begin, furthest + 0.05 * (furthest - begin))
    panels[-1].set_xlabel("training time, s")
    drawing.supylabel("validation loss, nat", fontsize=8.8)
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=COLOURS[0], label=f"{whose[:-2]}, mean"),
        Line2D([], [], color=COLOURS[1], linestyle="--", label="recipe, mean"),
        Patch(facecolor=FAINT, alpha=0.35, linewidth=0, label="seeds: smallest to largest"),
        Line2D([], [], color=INK, marker="D", markersize=4, label=f"the recipe reaches {whose} final loss, 95 %"),
    ]
    legend_below(drawing, handles, 2, left=True)
    return drawing


def _curve(*arms: StudyArm) -> tuple[LossPoint, ...]:
    runs = [run for arm in arms for run in arm.runs.values()]
    ended = [run.record for run in runs if run.final is not None and run.record is not None]
    return points(ended, "val_step", "val_time_s", "val_loss")


def _seeds(axes: Axes, curve: Sequence[LossPoint], place: int) -> None:
    at = [p.time_s for p in curve]
    axes.fill_between(
        at, [p.low for p in curve], [p.high for p in curve], color=COLOURS[place], alpha=0.18, linewidth=0
    )
    axes.plot(at, [p.mean for p in curve], "--" if place else "-", color=COLOURS[place], linewidth=1.4)


def _reached(axes: Axes, finding: ArmVerdict, end: LossPoint) -> None:
    """Mark when the recipe reaches bf16's final loss, with the interval."""
    speed = finding.speedup
    if speed is None or speed.less_time is None:
        return
    axes.plot([(1 - speed.less_time) * end.time_s], [end.mean], "D", color=INK, markersize=4, zorder=5)
    if speed.less_time_interval is not None:
        ends = [(1 - share) * end.time_s for share in speed.less_time_interval]
        axes.plot(ends, [end.mean, end.mean], color=INK, linewidth=1.6, zorder=4)


def _title(finding: ArmVerdict) -> str:
    assert finding.speedup is not None
    found = finding.speedup.to_equal_loss
    return f"{finding.arm.name}: {text.speedup(found) if found else 'no time to equal loss'}"
