"""Put published answers into one sentence and one picture for a README: each model's step today, a rival's, the advised."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from te_bench.advice.published import Answer, choice, stored_answers
from te_bench.experiments.store import load, written
from te_bench.reports.analysis.measures import of_processes
from te_bench.reports.analysis.naming import TE_BENCH
from te_bench.reports.analysis.rows import identity
from te_bench.reports.page import text
from te_bench.reports.page.drawing import COLOURS, FAINT, LINE, Drawing, blank, draw, legend_below, styled
from te_bench.reports.page.embed import Headline

PALE = "#d5d9de"  # of what a reader has, behind the other bars
ALONE = "*"  # marks a model without a rival's time
FASTER = 9  # characters between the last two columns
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
    """How much faster than what users have, on what energy, how much faster than each rival, how many models have none."""
    faster = _between([one.speedup.value for one in ours if one.speedup])
    by = f"all by {use}" if (use := _use(ours)) else f"by {TE_BENCH}"
    said = f"**{len(ours)} of {models} models train {faster} times as fast as in {_have(ours)}, {by}.**"
    if energy := [100 * share for one in ours if (share := _energy(one))]:
        between = text.span(f"{min(energy):.0f}", f"{max(energy):.0f}")
        said += f" A step takes {between} % as much energy ({_models(len(energy))})."
    by_rival: dict[str, list[float]] = {}
    for one in ours:
        for rival, over in one.over_rivals.items():
            by_rival.setdefault(rival, []).append(over)
    beside = [
        f"{_between(over)} times as fast as {rival} ({_models(len(over))})" for rival, over in sorted(by_rival.items())
    ]
    said += f" Where a rival was timed, that is {text.listed(beside, len(beside))}." if beside else ""
    alone = sum(not one.over_rivals for one in ours)
    return f"{said} No rival was timed for {_models(alone)}." if alone else said


def _models(number: int) -> str:
    return "one model" if number == 1 else f"{number} models"


def _use(ours: Sequence[Answer]) -> str:
    """Return the advised step in words; "" if models differ."""
    words = {one.use.words() for one in ours if one.use}
    return words.pop() if len(words) == 1 else ""


def _have(ours: Sequence[Answer]) -> str:
    return " or ".join(sorted({one.have.begins for one in ours}))


def _where(ours: Iterable[Answer]) -> str:
    """Return the GPUs that the journals name."""
    journals = [load(one.folder) for one in ours if written(one.folder)]
    gpus = {identity(known).get("gpu") for journal in journals for known in journal.environments.values()}
    return "".join(f", {gpu}" for gpu in sorted(filter(None, gpus)))


def _energy(one: Answer) -> float | None:
    """Of the advised step, as a share of what the user's takes; None where it was not counted of both."""
    if not written(one.folder):
        return None
    ran = {choice(step): step["records"] for step in one.stored["steps"]}
    ok = {record.trial.id: record for record in load(one.folder).records.values() if record.outcome == "ok"}
    use, have = (
        of_processes([ok[trial] for trial in ran.get(step, ()) if trial in ok], "energy_j") if step else None
        for step in (one.use, one.have)
    )
    return use / have if use and have else None


def _between(values: Sequence[float]) -> str:
    return text.span(f"{min(values):.2f}", f"{max(values):.2f}")


@styled
def _picture(ours: Sequence[Answer]) -> Drawing:
    """Draw bars as long as a step's share of the time of the user's step; the greatest speed-up first."""
    shown = sorted((_bars(one) for one in ours), key=lambda bars: -bars[0].faster)
    rows = sum(len(bars) + GAP for bars in shown)
    left = 1 + max(len(bar.name) for bars in shown for bar in bars)
    right = LINE - FASTER - 2.5 - max(len(bar.times) for bars in shown for bar in bars)
    figure = blank(ROW * (rows + 1) + LEGEND)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, LINE)
    axes.set_ylim(rows, -1)
    for x, heading in ((LINE - FASTER, "ms a step"), (LINE, "speed-up")):
        axes.text(x, -0.5, heading, ha="right", va="center")
    place = 0.5
    for bars in shown:
        for bar in bars:
            _draw(axes, bar, left, right, place)
            place += 1
        place += GAP
    use, have = _use(ours) or "the advised step", f"what you have, {_have(ours)}"
    legend = {COLOURS[0]: use, PALE: have}
    if any(len(bars) > 1 for bars in shown):
        legend[FAINT] = "the fastest rival that was measured, where it beats that"
    if any(bars[0].name.endswith(ALONE) for bars in shown):
        legend["none"] = f"{ALONE} no rival was timed"
    legend_below(figure, [Patch(facecolor=colour, label=label) for colour, label in legend.items()], 1, left=True)
    alt = "; ".join("".join(bar.alt for bar in bars) for bars in shown)
    return draw("headline", "headline", f"ms a step of {have}, and of {use}{_where(ours)}", alt, figure)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bar:
    """One bar with what stands beside it; `best`: of the advised step."""

    name: str
    share: float
    times: str
    faster: float
    alt: str
    best: bool = False


def _bars(one: Answer) -> list[_Bar]:
    """Return the bar of the advised step, and that of the fastest step of others unless it is the user's."""
    assert one.use is not None
    assert one.speedup is not None
    have, use = one.seconds[one.have], one.seconds[one.use]
    now, advised = text.milliseconds(have), text.milliseconds(use)
    faster = one.speedup.value
    alt = f"{one.model} {now} and {advised}, {text.times(faster)}"
    name = one.model if one.over_rivals else f"{one.model}{ALONE}"
    bars = [_Bar(name=name, share=use / have, times=f"{now} → {advised}", faster=faster, alt=alt, best=True)]
    if one.best is not None and one.best != one.have:
        name, took = one.best.begins, one.seconds[one.best]
        times = text.milliseconds(took)
        bars.append(_Bar(name=name, share=took / have, times=times, faster=have / took, alt=f" ({name} {times})"))
    return bars


def _draw(axes: Axes, bar: _Bar, left: float, right: float, y: float) -> None:
    """Draw one bar; left, right: where the bar of the user's step begins and ends."""
    weight = "bold" if bar.best else "normal"
    axes.text(0, y, bar.name, va="center", weight=weight)
    if bar.best:
        axes.barh(y, right - left, left=left, height=BAR, color=PALE)
    colour = COLOURS[0] if bar.best else FAINT
    axes.barh(y, bar.share * (right - left), left=left, height=BAR, color=colour)
    axes.text(LINE - FASTER, y, bar.times, ha="right", va="center")
    axes.text(LINE, y, text.times(bar.faster), ha="right", va="center", weight=weight)
