"""Draw the figures of a convergence verdict: gaps against the margin, gaps by step, spikes, FP8 numerics over time."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from te_bench.reports.analysis.measures import CONFIDENCE
from te_bench.reports.convergence.equivalence import Verdict, level
from te_bench.reports.convergence.study import StudyArm
from te_bench.reports.convergence.study_verdict import StudyVerdict
from te_bench.reports.page import text
from te_bench.reports.page.drawing import COLOURS, FAINT, INK, MARKERS, NAME, blank, legend_below, without_y

VERDICT_COLOURS = {
    Verdict.EQUIVALENT: COLOURS[2],
    Verdict.NON_INFERIOR: COLOURS[0],
    Verdict.INFERIOR: COLOURS[1],
    Verdict.DIVERGED: COLOURS[1],
    Verdict.INCONCLUSIVE: COLOURS[6],
}
ROLES = ("input", "weight", "grad_output")
FIGURES = ("amax", "saturated", "underflowed")
_TITLES = {"amax": "log2 of the amax", "saturated": "saturated, log10", "underflowed": "underflowed, log10"}
LINE_HEIGHT = 0.15  # inches of each further line of a name
FAR = 3.0  # a frame holds whole curves if they need at most this many times the room of their later half and band
RAREST = 1e-7  # smaller fractions are shown as none


def forest(found: StudyVerdict) -> Figure | None:
    """Return the mean gap of each configuration with its interval, over the margin's zone; None if none has a gap."""
    findings = [finding for finding in found.findings if finding.judgement.comparison is not None]
    if not findings:
        return None
    figure, axes = _named_rows([f"{finding.arm.name}: {found.label(finding)}" for finding in findings], 1.0, 0.5)
    inside = [c for f in findings if (c := f.judgement.comparison) and c.interval and f is not found.broken]
    widest = max([found.margin, *(abs(end) for c in inside for end in c.interval or ())]) * 1.3
    axes.axvspan(-found.margin, found.margin, color=COLOURS[2], alpha=0.12, linewidth=0)
    axes.axvline(0, color=FAINT, linewidth=0.8)
    for row, finding in enumerate(findings):
        comparison, colour = finding.judgement.comparison, VERDICT_COLOURS[finding.verdict]
        assert comparison is not None
        low, high = comparison.interval or (comparison.gap, comparison.gap)
        if low > widest or high < -widest:  # e.g. the broken arm: mark it at the edge, with its size in words
            end, mark = (0.995, ">") if low > widest else (0.005, "<")
            where: Any = {"transform": axes.get_yaxis_transform(), "clip_on": False}
            axes.plot([end], [row], mark, color=colour, markersize=7, **where)
            side = "right" if low > widest else "left"
            shown = axes.text(0.97 if side == "right" else 0.03, row, f"{comparison.gap:+.3f}", **where)
            shown.set(ha=side, va="center", fontsize=8.8)
            continue
        axes.plot([low, high], [row, row], color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.plot([comparison.gap], [row], "o", color=colour, markersize=6)
    axes.set_xlim(-widest, widest)
    axes.locator_params(axis="x", nbins=5)  # labels as wide as -0.0050
    within = f"shaded: the margin {found.margin:g}"
    axes.set_xlabel(f"final loss less {found.study.whose}, nat; {level(found.alpha)} intervals ({within})")
    return figure


def _named_rows(names: Sequence[str], height: float, row_height: float) -> tuple[Figure, Axes]:
    """Return a figure with a row below each name; height, row_height: inches for names of one line."""
    folded = [text.folded(name, NAME) for name in names]
    figure = blank(height + (row_height + LINE_HEIGHT * (max(map(len, folded)) - 1)) * len(names))
    axes = figure.subplots()
    for row, lines in enumerate(folded):
        where = axes.get_yaxis_transform()
        axes.text(0.0, row - 0.18, "\n".join(lines), va="bottom", fontsize=8.8, transform=where)
    axes.set_ylim(len(names) - 0.5, -0.75)
    without_y(axes)
    return figure, axes


def gap_curves(found: StudyVerdict) -> Figure | None:
    """Return the mean gap by step of A/A and every recipe, with a simultaneous band over the last quarter; None if none."""
    drawn = [f for f in (found.aa, *found.recipes) if f is not None and f.band is not None]
    if not drawn:
        return None
    figure = blank(0.7 + 0.95 * len(drawn))
    panels = figure.subplots(len(drawn), sharex=True, sharey=True, squeeze=False)[:, 0]
    reach, curves = [found.margin], []
    for axes, finding in zip(panels, drawn, strict=True):
        band = finding.band
        assert band is not None
        steps, means = finding.gap_curve
        axes.axhspan(-found.margin, found.margin, color=COLOURS[2], alpha=0.12, linewidth=0)
        axes.axhline(0, color=FAINT, linewidth=0.8)
        axes.plot(steps, means, color=COLOURS[0], linewidth=1.4)
        axes.fill_between(band.step, band.low, band.high, color=COLOURS[0], alpha=0.2, linewidth=0)
        reach += [*(abs(v) for v in (*band.low, *band.high)), *(abs(m) for m in means[len(means) // 2 :])]
        curves.append((axes, steps, means))
        name = f"{finding.arm.name} (mean of {len(finding.seeds)}{', the others diverged' if finding.arm.diverged else ''})"
        axes.set_title("\n".join(text.folded(name, NAME)), loc="left", fontsize=8.8, pad=3)
    _frame(curves, max(reach))
    panels[-1].set_xlabel("step")
    figure.supylabel("gap, nat", fontsize=8.8)  # a figure of one recipe has no room for more
    handles = [
        Patch(facecolor=COLOURS[2], alpha=0.3, label=f"within the margin {found.margin:g}"),
        Patch(facecolor=COLOURS[0], alpha=0.3, label=f"{100 * CONFIDENCE:g} % band of the last quarter"),
    ]
    legend_below(figure, handles, 2, left=True)
    return figure


def _frame(curves: Sequence[tuple[Axes, Sequence[float], Sequence[float]]], reach: float) -> None:
    """Set frames that hold `reach`, and whole curves unless they exceed FAR times it; points outside are marked."""
    highest = max((abs(mean) for _, _, means in curves for mean in means), default=0.0)
    limit = 1.15 * (max(highest, reach) if highest <= FAR * reach else reach)
    for axes, steps, means in curves:
        axes.set_ylim(-limit, limit)
        outside = [(mean, step) for step, mean in zip(steps, means, strict=True) if abs(mean) > limit]
        for mean, step in outside:
            axes.plot(
                [step], [math.copysign(0.93 * limit, mean)], "^" if mean > 0 else "v", color=COLOURS[0], markersize=4
            )
        if outside:
            mean, step = max(outside, key=lambda point: abs(point[0]))
            where: Any = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5}
            axes.annotate(f"{mean:+.3f}", (step, math.copysign(0.85 * limit, mean)), **where)


def spikes(found: StudyVerdict) -> Figure | None:
    """Return where losses and gradient norms spiked, by configuration, and where runs diverged; None if unknown."""
    arms = [arm for arm in found.study.arms if any(run.stability for run in arm.runs.values())]
    if not arms:
        return None
    figure, axes = _named_rows([arm.name for arm in arms], 1.1, 0.45)
    for row, arm in enumerate(arms):
        for run in arm.runs.values():
            seen = run.stability
            if seen is None:
                continue
            for place, events in enumerate((seen.loss_spikes, seen.grad_spikes)):
                style: Any = {"color": COLOURS[1 - place], "markersize": 4.5, "alpha": 0.7, "mew": 0}
                axes.plot(events, [row + 0.2 * place - 0.05] * len(events), MARKERS[2 * place], **style)
            if run.diverged:
                assert run.record is not None
                last = run.record.samples["step"][-1] if seen.non_finite is None else seen.non_finite
                axes.plot([last], [row + 0.05], "x", color=INK, markersize=7, mew=1.6)
    steps = [s for arm in arms for run in arm.runs.values() if run.record for s in run.record.samples.get("step") or []]
    axes.set_xlim(0, max(steps, default=1.0) or 1.0)
    axes.set_xlabel("step")
    handles = [
        Line2D([], [], color=COLOURS[1], marker=MARKERS[0], linestyle="", label="loss"),
        Line2D([], [], color=COLOURS[0], marker=MARKERS[2], linestyle="", label="gradient norm"),
        Line2D([], [], color=INK, marker="x", linestyle="", label="diverged"),
    ]
    legend_below(figure, handles, 3)
    return figure


def numerics(arm: StudyArm) -> Figure | None:
    """Return amax, saturation and underflow of every layer's tensors over the training, of the first probed seed."""
    records = (run.record for run in arm.runs.values() if run.record and run.record.samples.get("probe_step"))
    if (record := next(records, None)) is None:
        return None
    samples: Mapping[str, Sequence[float | None]] = record.samples
    steps = samples["probe_step"]
    found = [name.partition(":")[2] for name in samples if name.startswith("amax:")]
    tensors = [name for role in ROLES for name in found if name.rpartition(".")[2] == role]
    figure = blank(1.2 + max(0.055 * len(tensors), 1.6))
    panels = figure.subplots(1, len(FIGURES), sharey=True)
    for axes, kind in zip(panels, FIGURES, strict=True):
        rows = [[_shade(kind, v) for v in samples[f"{kind}:{name}"][: len(steps)]] for name in tensors]
        shown = axes.imshow(rows, aspect="auto", interpolation="nearest", cmap="cividis")
        bar = figure.colorbar(shown, ax=axes, location="bottom", fraction=0.05, pad=0.02)
        bar.ax.tick_params(labelsize=7.5)
        axes.set_title(_TITLES[kind], fontsize=8.8)
        ends = [0, len(steps) - 1] if len(steps) > 1 else [0]
        axes.set_xticks(ends, [f"{steps[i]:g}" for i in ends], fontsize=7.5)
    first = [
        next(i for i, n in enumerate(tensors) if n.endswith(role))
        for role in ROLES
        if any(n.endswith(role) for n in tensors)
    ]
    panels[0].set_yticks(first, [tensors[i].rpartition(".")[2] for i in first], fontsize=8)
    for axes in panels:
        for i in first[1:]:
            axes.axhline(i - 0.5, color="white", linewidth=1.2)
    panels[1].set_xlabel("step; rows: layers, from the first down, in three blocks by tensor", fontsize=8.5)
    return figure


def _shade(kind: str, value: float | None) -> float:
    """Return a logarithm for an image; NaN, which is drawn as nothing, for a non-finite value."""
    if value is None:
        return math.nan
    if kind == "amax":
        return math.log2(value) if value > 0 else math.nan
    return math.log10(max(value, RAREST))
