"""Put published answers into one sentence and one picture for a README: each model's step today, a rival's, the advised."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from te_bench.advice.published import Answer, energy, stored_answers
from te_bench.experiments.adoption import PER_BLOCK
from te_bench.experiments.store import load, written
from te_bench.reports.analysis.naming import TE_BENCH
from te_bench.reports.analysis.rows import identity
from te_bench.reports.page import text
from te_bench.reports.page.drawing import COLOURS, FAINT, LINE, Drawing, blank, draw, legend_below, styled
from te_bench.reports.page.embed import Headline

PALE, MIDDLE = "#d5d9de", "#8fbfe0"  # of the step in eager mode, and of te-bench's in bf16, behind the other bars
ALONE = "*"  # marks a model without a rival's time
FASTER, SAVED = 9, 7  # characters of the last two columns: the speed-up, and the energy if it was counted
ROW, LEGEND = 0.2, 0.75  # inches
GAP, BAR = 0.3, 0.72  # rows between two models; a bar's height, in rows


def headline(directory: Path) -> Headline:
    """Return the headline of advise's folders in `directory`. Raises ValueError if none advises a step of te-bench's."""
    found = stored_answers(directory)
    ours = [one for one in found if one.is_ours and one.speedup and one.have in one.seconds]
    if not ours:
        raise ValueError(f"{directory}: no model is advised a step of te-bench's, so there is no headline")
    return Headline(sentence=_sentence(ours, len(found)), picture=_picture(ours))


def _sentence(ours: Sequence[Answer], models: int) -> str:
    """Say in one sentence how much faster than eager mode, and in a list: without FP8, on what energy, beside rivals."""
    faster = _between([one.speedup.value for one in ours if one.speedup])
    by = f"all by {use}" if (use := _use(ours)) else f"by {TE_BENCH}"
    lines = []
    plain = [(one.seconds[one.have], bf16, one.seconds[one.use]) for one in ours if (bf16 := _bf16(one)) and one.use]
    if plain:
        without = _between([have / bf16 for have, bf16, _ in plain])
        adds = _between([bf16 / use for _, bf16, use in plain])
        of = f" ({_models(len(plain))})" if len(plain) < len(ours) else ""
        lines.append(
            f"**Without FP8** te-bench is {without} times as fast{of}; FP8 makes that step {adds} times as fast."
        )
    if saved := [100 * (share - 1) for one in ours if (share := energy(one))]:
        between = text.span(f"{-max(saved):.0f}", f"{-min(saved):.0f}")
        lines.append(f"**Energy**: {between} % less a step ({_models(len(saved))}).")
    timed = [one for one in ours if one.over_rivals]
    lines.append(_against(timed) if timed else "")
    if alone := len(ours) - len(timed):
        lines[-1] = f"{lines[-1]} No rival was timed for {_models(alone)}.".strip()
    said = f"**{len(ours)} of {models} models train {faster} times as fast as in {_have(ours)}, {by}.**"
    return "\n".join([said, "", *(f"- {line}" for line in lines)]) if lines else said


def _against(timed: Sequence[Answer]) -> str:
    """Return how many times as fast as the fastest step without te-bench, which step that is, and what is not timed."""
    over = _between([one.over for one in timed if one.over])
    names = Counter(one.best.begins for one in timed if one.best)
    which = text.listed([f"{name} for {_models(number)}" for name, number in names.most_common()], len(names))
    ran = {of.mode for one in timed for of in one.seconds if of.of_others}
    ways = {"compile-reduce-overhead": "in CUDA graphs", PER_BLOCK: "compiled block by block"}
    missing = [how for mode, how in ways.items() if mode not in ran]
    none = f" No rival was timed {' or '.join(missing)}." if missing else ""
    return f"**Against the fastest step without te-bench** ({which}): {over} times as fast.{none}"


def _bf16(one: Answer) -> float | None:
    """Return the seconds of te-bench's bf16 step beside an advised one in FP8; None if either is not there."""
    return one.seconds[one.bf16] if one.bf16 and one.use and one.use.recipe else None


def _models(number: int) -> str:
    return "one model" if number == 1 else f"{number} models"


def _use(ours: Sequence[Answer]) -> str:
    """Return the advised step in words; "" if models differ."""
    words = {one.use.words() for one in ours if one.use}
    return words.pop() if len(words) == 1 else ""


def _have(ours: Sequence[Answer]) -> str:
    return " or ".join(sorted({one.have.begins for one in ours}))


def _where(ours: Iterable[Answer]) -> str:
    journals = [load(one.folder) for one in ours if written(one.folder)]
    gpus = {identity(known).get("gpu") for journal in journals for known in journal.environments.values()}
    return "".join(f", {gpu}" for gpu in sorted(filter(None, gpus)))


def _between(values: Sequence[float]) -> str:
    return text.span(f"{min(values):.2f}", f"{max(values):.2f}")


@styled
def _picture(ours: Sequence[Answer]) -> Drawing:
    """Draw bars as long as a step's share of the time of the user's step; the greatest speed-up first."""
    shown = sorted((_bars(one) for one in ours), key=lambda bars: -bars[0].faster)
    rows = sum(len(bars) + GAP for bars in shown)
    left = 1 + max(len(bar.name) for bars in shown for bar in bars)
    counted = any(bar.energy for bars in shown for bar in bars)
    ends = LINE - FASTER - SAVED * counted  # the column of times
    right = ends - 2.5 - max(len(bar.times) for bars in shown for bar in bars)
    figure = blank(ROW * (rows + 1) + LEGEND)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, LINE)
    axes.set_ylim(rows, -1)
    headings = [(ends, "ms a step"), (LINE, "speed-up"), *([(LINE - FASTER, "energy")] if counted else [])]
    for x, heading in headings:
        axes.text(x, -0.5, heading, ha="right", va="center")
    place = 0.5
    for bars in shown:
        for bar in bars:
            _draw(axes, bar, left, right, ends, place)
            place += 1
        place += GAP
    use, have = _use(ours) or "the advised step", _have(ours)
    legend = {COLOURS[0]: use}
    if any(bars[0].bf16 for bars in shown):
        legend[MIDDLE] = f"{TE_BENCH} bf16"
    legend[PALE] = have
    if any(len(bars) > 1 for bars in shown):
        legend[FAINT] = f"the fastest rival that was timed, where it beats {have}"
    if any(bars[0].name.endswith(ALONE) for bars in shown):
        legend["none"] = f"{ALONE} no rival was timed"
    legend_below(figure, [Patch(facecolor=colour, label=label) for colour, label in legend.items()], 1, left=True)
    alt = "; ".join("".join(bar.alt for bar in bars) for bars in shown)
    steps = text.listed([have, *([legend[MIDDLE]] if MIDDLE in legend else []), use], 3)
    caption = f"ms a step of {steps}{_where(ours)}"
    return draw("headline", "headline", caption, f"{caption}: {alt}", figure)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bar:
    """One bar with what stands beside it; `best`: of the advised step; bf16: the share that te-bench's bf16 step takes.

    energy: the change against the user's step.
    """

    name: str
    share: float
    times: str
    faster: float
    alt: str
    best: bool = False
    bf16: float | None = None
    energy: str = ""


def _bars(one: Answer) -> list[_Bar]:
    """Return the bar of the advised step, and that of the fastest step of others unless it is the user's."""
    assert one.use is not None
    assert one.speedup is not None
    have, use = one.seconds[one.have], one.seconds[one.use]
    bf16 = _bf16(one)
    times = " → ".join(_milliseconds(took) for took in (have, bf16, use) if took)
    faster = one.speedup.value
    alt = f"{one.model} {times}, {text.times(faster)}"
    name = one.model if one.over_rivals else f"{one.model}{ALONE}"
    share = bf16 / have if bf16 else None
    joules = f"{100 * (spent - 1):+.0f} %".replace("-", "\N{MINUS SIGN}") if (spent := energy(one)) else ""
    bars = [
        _Bar(name=name, share=use / have, times=times, faster=faster, alt=alt, best=True, bf16=share, energy=joules)
    ]
    if one.best is not None and one.best != one.have:
        name, took = one.best.begins, one.seconds[one.best]
        times = _milliseconds(took)
        bars.append(_Bar(name=name, share=took / have, times=times, faster=have / took, alt=f" ({name} {times})"))
    return bars


def _milliseconds(seconds: float) -> str:
    """Return them by three digits, so that bars have room: 9.87, 98.7, 987."""
    return f"{seconds * 1e3:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"


def _draw(axes: Axes, bar: _Bar, left: float, right: float, ends: float, y: float) -> None:
    """Draw one bar; left, right: where the bar of the user's step begins and ends; ends: the end of the times' column."""
    weight = "bold" if bar.best else "normal"
    axes.text(0, y, bar.name, va="center", weight=weight)
    if bar.best:
        axes.barh(y, right - left, left=left, height=BAR, color=PALE)
        axes.barh(y, (bar.bf16 or 0) * (right - left), left=left, height=BAR, color=MIDDLE)
    colour = COLOURS[0] if bar.best else FAINT
    axes.barh(y, bar.share * (right - left), left=left, height=BAR, color=colour)
    axes.text(ends, y, bar.times, ha="right", va="center")
    axes.text(LINE - FASTER, y, bar.energy, ha="right", va="center")
    axes.text(LINE, y, text.times(bar.faster), ha="right", va="center", weight=weight)
