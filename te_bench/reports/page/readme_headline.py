"""Put the answer of a run into one sentence and one picture for a README: the fastest configuration of each kind."""

from te_bench.reports.analysis.naming import TE_BENCH
from te_bench.reports.analysis.ranking import FastestOfKind
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.bars import Bar, bars
from te_bench.reports.page.drawing import COLOURS, FAINT, Drawing, draw, styled


def sentence(result: GroupResult) -> str:
    """Return sentences with the time of the fastest step, of the baseline's kind, and of the others.

    They say which others paired runs do not distinguish from the fastest. Raises ValueError if fewer than two kinds were
    timed.
    """
    fastest, *others = _several(result)
    others.sort(key=lambda other: not other.step.is_baseline)
    said, tied = [], result.steps.fastest if fastest.step in result.steps.fastest else []
    for other in others:
        longer = f", {text.speedup(other.times_as_long)} as long" if other.times_as_long else ""
        longer += ", not distinguished from it" if other.step in tied else ""
        said.append(f"{other.name}: {_time(other)}{longer}.")
    return f"**{fastest.name}: {_time(fastest)}. {said[0]}** {' '.join(said[1:])}".rstrip()


@styled
def figure(result: GroupResult) -> Drawing:
    """Return a bar chart of each kind, in ms a step. Raises ValueError if fewer than two kinds were timed."""
    found = _several(result)
    alt = "; ".join(f"{one.name} {_time(one)}" for one in found)
    drawn = [
        Bar(
            name=one.name,
            value=one.seconds * 1e3,
            remark=_time(one),
            colour=COLOURS[0] if one.kind == TE_BENCH else FAINT,
        )
        for one in found
    ]
    caption = f"{result.group.title}, {result.group.where}"
    return draw("headline", "headline", caption, f"{caption}: {alt}", bars(drawn, "ms a step"))


def _time(one: FastestOfKind) -> str:
    return f"{text.milliseconds(one.seconds)} ms"


def _several(result: GroupResult) -> tuple[FastestOfKind, ...]:
    found = result.fastest
    if len(found) < 2:
        suite = result.group.suite
        raise ValueError(f"{suite}: a headline compares two kinds of training step or more; timed: {len(found)}")
    return found
