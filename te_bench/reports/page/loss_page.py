"""Show the verdict on a user's losses: its tables, and one page to send to a colleague (one file that loads nothing)."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from te_bench.experiments.store import own
from te_bench.reports.convergence.equivalence import LossComparison, Verdict, level
from te_bench.reports.convergence.loss_csv import Curve, Losses
from te_bench.reports.convergence.loss_verdict import LossVerdict, answers, prices
from te_bench.reports.files import write_file
from te_bench.reports.page import text
from te_bench.reports.page.drawing import COLOURS, FAINT, Drawing, blank, draw, legend_below, styled, without_y
from te_bench.reports.page.table import Table, Value, number, table_of, word
from te_bench.reports.page.template import rendered
from te_bench.reports.page.verdict_figures import VERDICT_COLOURS
from te_bench.reports.page.verdict_tables import interval

ARMS = ("baseline", "candidate")
LATE = 0.5  # the last share of training, which the second panel shows
POINTS = 200  # drawn points of a curve
MEANING = {
    Verdict.EQUIVALENT: "The gap is shown to lie within the margin, above or below.",
    Verdict.NON_INFERIOR: "The gap is below the margin. It may lie further below 0 than the margin.",
    Verdict.INFERIOR: "The gap is shown to be above the margin.",
    Verdict.DIVERGED: "A run broke: its loss is not finite, or rose and did not come back.",
    Verdict.INCONCLUSIVE: "Finding no difference does not prove that there is none.",
}


def losses(found: LossVerdict) -> Table | None:
    """Return the table of the comparison's known numbers; None if the candidate diverged."""
    c = found.comparison
    if c is None:
        return None
    tested, p = level(c.alpha), c.claims
    each = "pairs" if c.paired else "runs a side"

    def runs(needed: float | None) -> str:
        return text.MISSING if needed is None else f"{text.count(needed)} {each}"

    within, below, above = (p.equivalent, p.non_inferior, p.inferior) if c.interval else (None, None, None)
    rows = (
        ("Runs", word(f"{c.n} pairs" if c.paired else f"{c.n} against {c.n_control}, unpaired")),
        ("Mean gap, above 0 is worse", number(c.gap, text.signed)),
        ("95 % interval", word(interval(c.interval_95))),
        ("Mean gap, % of the baseline's loss", number(100 * found.relative(c.gap), text.signed)),
        ("95 % interval of it", word(interval(_percent(found, c.interval_95)))),
        *(() if tested == "95 %" else ((f"{tested} interval, of the tests", word(interval(c.interval))),)),
        (f"{tested} interval, Student's t", word(interval(c.t_interval))),
        ("Margin", number(c.margin)),
        ("p: within the margin", number(within, text.probability)),
        ("p: not worse by the margin", number(below, text.probability)),
        ("p: worse by the margin", number(above, text.probability)),
        ("Correlation of the pairs", number(c.correlation, text.signed)),
        ("Power at a true gap of 0", number(c.power, text.percent)),
        ("Smallest margin with 80 % power", number(c.detectable)),
        ("Needed for 80 % power", number(c.seeds_needed, runs)),
        ("To show what the measured gap is", number(c.seeds_needed_at_gap, runs)),
    )
    told = [{"What": word(name), "Value": value} for name, value in rows if value.text != text.MISSING]
    return table_of("losses", "Final losses", told)


def _percent(found: LossVerdict, ends: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if ends is None else (100 * found.relative(ends[0]), 100 * found.relative(ends[1]))


def certainty(found: LossVerdict) -> Table | None:
    """Return the table of what more seeds would show, by the measured spread and by its upper bound; None if unknown."""
    rows = [
        {
            "Pairs" if found.matched.seeds else "Seeds a side": number(price.seeds, text.count),
            "Smallest margin, nat": _margin(price.margin),
            "% of the loss": _margin(100 * found.relative(price.margin)),
            "If the spread is larger, nat": _margin(price.cautious),
        }
        for price in prices(found)
    ]
    note = (
        "The smallest margin that is shown in 80 % of cases, if there is no gap at all. The last column uses the spread's "
        "upper bound of 80 % confidence, because these runs only estimate the spread."
    )
    return table_of("certainty", "What more seeds would show", rows, note, text_columns=0)


def _margin(value: float) -> Value:
    return number(value) if math.isfinite(value) else word(None)


def finals(found: LossVerdict) -> Table | None:
    """Return the table of every run's final loss: by pairs, or one arm after the other."""
    m = found.matched
    if m.seeds:
        rows = [
            {"Seed": word(seed), "Baseline": _loss(a), "Candidate": _loss(b), "Gap": _gap_of(a, b)}
            for seed, a, b in zip(m.seeds, m.baseline, m.candidate, strict=True)
        ]
        without = [
            {"Seed": word(f"{seed}, left out"), side: _loss(final), **dict.fromkeys((other, "Gap"), word(None))}
            for side, other, arm in (
                ("Baseline", "Candidate", found.baseline),
                ("Candidate", "Baseline", found.candidate),
            )
            for seed, final in arm.final.items()
            if seed not in m.seeds
        ]
        return table_of(
            "runs", "Every pair, and runs without a partner" if without else "Every pair", [*rows, *without]
        )
    arms = zip(ARMS, (found.baseline, found.candidate), strict=True)
    rows = [
        {"Side": word(side), "Run": word(seed), "Final loss": _loss(final)}
        for side, arm in arms
        for seed, final in arm.final.items()
    ]
    return table_of("runs", "Every run", rows, text_columns=2)


def _gap_of(baseline: float, candidate: float) -> Value:
    return number(candidate - baseline if math.isfinite(candidate - baseline) else None, text.signed)


def _loss(value: float) -> Value:
    return Value(
        text=text.loss(value) if math.isfinite(value) else str(value), sort=value if math.isfinite(value) else None
    )


@styled
def write_page(found: LossVerdict, path: Path) -> Path:
    """Write the page, and return its path. Raises ValueError if it cannot be written."""
    c = found.comparison
    drawings = [*_curves(found), *([_gap(found, c)] if c else [])]
    content = {
        "verdict": found.verdict,
        "headline": found.plain,
        "meaning": MEANING[found.verdict],
        "found": found,
        "answers": answers(found),
        "drawings": drawings,
        "numbers": losses(found),
        "runs": finals(found),
        "certainty": certainty(found),
    }
    own(path.parent)
    write_file(path, rendered("losses.html.j2", content), "--html")
    return path


def _curves(found: LossVerdict) -> list[Drawing]:
    arms = found.baseline, found.candidate
    if not all(arm.curves for arm in arms):
        return []
    what = "training loss" if found.candidate.training else "loss"
    where = f"{what} against the step, each seed a thin line, their mean a thick one"
    return [draw("losses", "losses", "Losses", f"Losses: {where}", _curve_figure(arms, what))]


def _curve_figure(arms: Sequence[Losses], what: str) -> Figure:
    figure = blank(5.0)
    whole, late = figure.subplots(2)
    for place, arm in enumerate(arms):
        runs = list(arm.curves.values())
        end = max(curve.step[-1] for curve in runs)
        for axes, start in ((whole, 0.0), (late, (1 - LATE) * end)):
            _arm(axes, runs, start, place)
    late.set_title("The second half", loc="left", fontsize=8.8)
    for axes in (whole, late):
        axes.set_ylabel(what)
        axes.grid(color=FAINT, alpha=0.25, linewidth=0.6)
    late.set_xlabel("step")
    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[place],
            linestyle="-" if place == 0 else "--",
            label=f"{side}, mean of {len(_ended(list(arm.curves.values())))}",
        )
        for place, (arm, side) in enumerate(zip(arms, ARMS, strict=True))
    ]
    legend_below(figure, handles, 2)
    return figure


def _arm(axes: Axes, runs: Sequence[Curve], start: float, place: int) -> None:
    style = "-" if place == 0 else "--"
    for curve in map(_thinned, runs):
        kept = [(x, y) for x, y in zip(curve.step, curve.loss, strict=True) if x >= start and math.isfinite(y)]
        axes.plot([x for x, _ in kept], [y for _, y in kept], style, color=COLOURS[place], linewidth=0.6, alpha=0.45)
    ended = [_thinned(curve) for curve in _ended(runs)]
    at = sorted({x for curve in ended for x in curve.step if x >= max(start, *(curve.step[0] for curve in ended))})
    if at := [x for x in at if x <= min(curve.step[-1] for curve in ended)]:
        mean = np.mean([np.interp(at, curve.step, curve.loss) for curve in ended], axis=0)
        axes.plot(at, mean, style, color=COLOURS[place], linewidth=1.8)


def _ended(runs: Sequence[Curve]) -> list[Curve]:
    """Return the runs that ended with finite losses; a run that broke early has no mean."""
    end = max(curve.step[-1] for curve in runs)
    return [curve for curve in runs if curve.step[-1] == end and all(map(math.isfinite, curve.loss))]


def _thinned(curve: Curve) -> Curve:
    """Return a curve of at most POINTS points, each the mean of its neighbours."""
    each = math.ceil(len(curve.step) / POINTS)
    steps, values = ([row[i : i + each] for i in range(0, len(row), each)] for row in (curve.step, curve.loss))
    return Curve(step=tuple(sum(s) / len(s) for s in steps), loss=tuple(sum(v) / len(v) for v in values))


def _gap(found: LossVerdict, c: LossComparison) -> Drawing:
    where = f"the mean gap over the margin {c.margin:g}; the verdict goes by its {level(c.alpha)} interval"
    return draw("gap", "gap", "The gap against the margin", f"The gap against the margin: {where}", _forest(found, c))


def _forest(found: LossVerdict, c: LossComparison) -> Figure:
    figure = blank(1.9)
    axes = figure.subplots()
    gaps = [b - a for a, b in zip(found.matched.baseline, found.matched.candidate, strict=True)] if c.paired else []
    ends = c.interval_95 or (c.gap, c.gap)
    widest = 1.2 * max(c.margin, *(abs(value) for value in (*ends, *gaps)))
    axes.axvspan(-c.margin, c.margin, color=COLOURS[2], alpha=0.12, linewidth=0)
    axes.axvline(0, color=FAINT, linewidth=0.8)
    colour = VERDICT_COLOURS[found.verdict]
    axes.plot(ends, [0, 0], color=colour, linewidth=1.0, solid_capstyle="butt")
    axes.plot(c.interval or ends, [0, 0], color=colour, linewidth=3.2, solid_capstyle="butt")
    axes.plot([c.gap], [0], "o", color=colour, markersize=7)
    axes.plot(gaps, [1] * len(gaps), "o", color=COLOURS[0], markersize=4.5, alpha=0.6, mew=0)
    axes.set_xlim(-widest, widest)
    axes.set_ylim(1.6 if gaps else 0.6, -0.6)
    without_y(axes)
    axes.set_xlabel("candidate less baseline, nat; to the right is worse")
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=colour, marker="o", label=f"mean gap, {level(c.alpha)} interval"),
        Line2D([], [], color=colour, linewidth=1.0, label="95 % interval"),
        Patch(facecolor=COLOURS[2], alpha=0.3, label=f"within the margin {c.margin:g}"),
    ]
    if gaps:
        handles.append(Line2D([], [], color=COLOURS[0], marker="o", linestyle="", markersize=4.5, label="every pair"))
    legend_below(figure, handles, 3)
    return figure
