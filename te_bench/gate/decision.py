"""Which trials became slower: every trial's pairs so far to REGRESSION, PASS, IMPROVED or INCONCLUSIVE, and who needs more.

A trial has two ratios, candidate / baseline: r of what its processes count by, and m of the mean of all their calls, which
has a bar of its own, MEAN_MARGINS margins. Three claims are tested: that r or m lies above its bar, that both lie below, and
r < 1. The first divides its share of alpha between r, two thirds, and m. The second divides nothing: where it is wrong one
of two claims is, each of which is wrong in at most alpha of cases (Berger 1982, Technometrics 24:295).

Each claim is held to alpha over all trials, their geometric mean and all looks together, by Holm's procedure over
group-sequential tests (Maurer & Bretz 2013, Stat. Biopharm. Res. 5:311; Ye, Li, Liu & Yao 2013, Stat. Med. 32:1112). That
is closed testing: any k true hypotheses are rejected, at whatever look, with a probability of at most k times what one
spends at level alpha / k, however the trials depend on each other; and the levels of every look rise with alpha, so a claim
that has been made passes its share on to the trials still undecided. Stopping a trial once it is decided, or the whole gate
when time is up, only loses rejections. Which trial gets the next pair may depend on what was seen: a look is a number of the
trial's own pairs, and one that is never reached claims nothing.

It is a pure function of the ratios, so the gate calls it again with every round of pairs. A trial's interval is as wide as
the autocorrelation of all pairs so far asks for, so a claim may come or go with the pairs of another trial.
docs/gate-statistics.md and tests/gate/test_gate_simulated.py have the simulated error rates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from te_bench.gate.looks import HolmClaim, LogRatios, MeasuredRatio, TrialRatios, divisor, holm
from te_bench.gate.question import ALPHA, MARGIN
from te_bench.gate.slowdown import Estimate, likeness

FAMILY = "geometric mean"
#: The mean of all calls must be shown to lie below 1 + so many margins: pairs vary by 0.8 to 10 times as much by it as by
#: the lowest tenth, 1.4 in the median.
MEAN_MARGINS = 2.5
#: Pairs without which nothing is claimed. Where processes of one program run at either of two speeds, as memory happens to
#: be laid out, all of n pairs show the same difference in up to 4^-n of cases: 0.1 %, which no noise among them warns of.
FEWEST = 5
WORTH_SAYING = 1.5  # times as wide as an interval of independent pairs: it is said why
SUSPECT_FROM = 3  # pairs; from 4 on 78 % of slow-downs are found instead of 83 % (100 to 150 simulations)

Ratios = Mapping[str, Sequence[float | None]]


class GateVerdict(StrEnum):
    """Slower by more than the margin; not slower by it; faster than the baseline, so not slower either; not told yet."""

    REGRESSION = "REGRESSION"
    PASS = "PASS"
    IMPROVED = "IMPROVED"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, kw_only=True, slots=True)
class GateJudgement(MeasuredRatio):
    """What the pairs of one trial, or the rounds of all of them, carry: by what a process counts by, and by all calls."""

    verdict: GateVerdict
    reason: str
    pairs: int  # used, up to the look that this judgement is of
    more: int = 0  # pairs to the next look of an undecided trial; 0 when there is none
    suspect: bool = False  # still to be decided, and by all its pairs so far slower than the margin
    mean: MeasuredRatio | None = None  # of all calls; None where they are not judged
    needed: int | None = None  # pairs that would decide it in 80 % of cases at the ratios as measured

    @property
    def passed(self) -> bool:
        return self.verdict in (GateVerdict.PASS, GateVerdict.IMPROVED)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateDecision:
    """The judgements by trial; `family`, of the geometric mean over the trials, is None for a single one."""

    trials: Mapping[str, GateJudgement]
    family: GateJudgement | None

    @property
    def judgements(self) -> dict[str, GateJudgement]:
        """The trials' and the family's, by name."""
        return {**self.trials, **({FAMILY: self.family} if self.family else {})}

    @property
    def more(self) -> dict[str, int]:
        """{trial: pairs to its next look} of the trials that are still to be decided."""
        return {name: judgement.more for name, judgement in self.trials.items() if judgement.more}


def decide(
    ratios: Ratios,
    *,
    means: Ratios | None = None,
    margin: float = MARGIN,
    alpha: float = ALPHA,
    looks: Sequence[int] | None = None,
    ended: bool = False,
    mde: float | None = None,
) -> GateDecision:
    """A verdict for each trial on its ratios so far, candidate / baseline, in the order of the rounds of pairs.

    means: of the same pairs, the ratios of the mean of all calls. REGRESSION: a trial's r > 1 + margin is shown, or that its
    mean m > 1 + MEAN_MARGINS margin. PASS: that both are below; IMPROVED: r < 1 as well. Else INCONCLUSIVE, and `more`
    says how many pairs the trial lacks to its next look. None in a trial's ratios is a round without a pair of it. `looks`
    are the numbers of used pairs at which a trial is judged, fixed before the first pair; without them each trial is judged
    once, on all it has, which is valid only where that number was not chosen by what was seen. ended: no more pairs will
    come, so that each trial's last look is at those it has (`looks_until`).

    The family's geometric mean is judged on the rounds in which every trial has a ratio, and asks for no pair of its own:
    when all trials PASS, so does it. A trial with fewer than FEWEST pairs is INCONCLUSIVE, and stays in the family. `mde`:
    how near to the margin a ratio need not be told from it, which bounds the pairs said to be needed; the margin itself
    if not given, so that an unchanged program passes.

    Raises ValueError for a trial that is called as the mean over the trials is.
    """
    trials = _series(ratios, means, margin, alpha, looks, ended)
    slower, passes, faster = (
        holm(trials, claim) for claim in (TrialRatios.slower, TrialRatios.passes, TrialRatios.faster)
    )
    finest = math.log1p(margin if mde is None else mde)
    judged = {name: _judge(name, one, slower, passes, faster, finest, len(trials)) for name, one in trials.items()}
    family = judged.pop(FAMILY, None) if len(ratios) > 1 else None
    if family and family.verdict is GateVerdict.INCONCLUSIVE and all(one.passed for one in judged.values()):
        family = replace(family, verdict=GateVerdict.PASS, reason="every trial passes, so their mean does", more=0)
    return GateDecision(trials=judged, family=family)


def _series(
    ratios: Ratios, means: Ratios | None, margin: float, alpha: float, looks: Sequence[int] | None, ended: bool
) -> dict[str, TrialRatios]:
    """The log-ratios of each trial and, of several, of their mean. Raises ValueError as `decide` does."""
    if FAMILY in ratios:
        raise ValueError(f"a trial called {FAMILY!r}: that is what the mean over the trials is called; rename it")
    kinds = [ratios] if means is None else [ratios, means]
    if len(ratios) > 1:
        kinds = [{**one, FAMILY: _mean_of_rounds(list(one.values()))} for one in kinds]
    bars = zip(kinds, (margin, MEAN_MARGINS * margin), (True, False), strict=False)
    times = [_build_series(kind, math.log1p(bar), trim, looks, ended) for kind, bar, trim in bars]
    return {name: TrialRatios(times=tuple(one[name] for one in times), alpha=alpha) for name in times[0]}


def _build_series(
    ratios: Ratios, bar: float, trim: bool, looks: Sequence[int] | None, ended: bool
) -> dict[str, LogRatios]:
    """Of every trial and the family, which is no more alike than its trials are."""
    found = {name: tuple(math.log(r) for r in values if r is not None) for name, values in ratios.items()}
    together = likeness([logs for name, logs in found.items() if name != FAMILY], trim=trim)
    series = {}
    for name, logs in found.items():
        # once: a look that fewer pairs do not reach
        planned = (max(len(logs), FEWEST),) if looks is None else tuple(looks)
        at = looks_until(len(logs), planned) if ended else planned
        alike = together.bound(likeness([logs], trim=trim))
        series[name] = LogRatios(logs=logs, looks=at, bar=bar, trim=trim, alike=alike)
    return series


def looks_until(pairs: int, looks: tuple[int, ...]) -> tuple[int, ...]:
    """The looks of a trial that ends after so many pairs: the last is there, if that is enough to claim anything.

    As if it had been planned so: the clock does not know the ratios. What was claimed before stays claimed, for the levels
    of the looks rise when fewer pairs are to come. Where suspects were run first, the ratios do have a say in when a trial
    ends; simulated gates (tests/gate/test_decision.py) err no more often for it.
    """
    return looks if not FEWEST <= pairs < looks[-1] else (*(look for look in looks if look < pairs), pairs)


def _mean_of_rounds(trials: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The geometric mean of each round over the trials; None where one of them has no ratio."""
    found: list[float | None] = []
    for values in zip(*trials, strict=False):  # a decided trial has no later rounds
        known = [math.log(ratio) for ratio in values if ratio is not None]
        found.append(math.exp(math.fsum(known) / len(known)) if len(known) == len(trials) else None)
    return found


def _judge(
    name: str, one: TrialRatios, slower: HolmClaim, passes: HolmClaim, faster: HolmClaim, finest: float, hypotheses: int
) -> GateJudgement:
    """The verdict of one trial: the claim that was made of it, REGRESSION before PASS should both have been."""
    first, pairs = one.times[0], len(one.times[0].logs)
    more = next((n - pairs for n in first.looks if n > pairs), 0)
    if pairs < 2:
        return GateJudgement(verdict=GateVerdict.INCONCLUSIVE, reason=_too_few(pairs), pairs=pairs, more=more)
    claim = slower if name in slower.made else passes
    look = claim.made.get(name, max(len(first.reached) - 1, 0))
    verdict = GateVerdict.INCONCLUSIVE
    if name in claim.made:
        verdict = GateVerdict.REGRESSION if claim is slower else GateVerdict.PASS
        if claim is passes and faster.made.get(name, look + 1) <= look:
            verdict = GateVerdict.IMPROVED
    undecided = verdict is GateVerdict.INCONCLUSIVE
    above = one.alpha / divisor(passes.left[name])
    shares = zip(one.times, one.shares(slower.left[name]), one.shares(hypotheses), strict=True)
    found, *means = (time.measured(look, a, above, last, undecided=undecided) for time, a, last in shares)
    each = zip(one.times, one.shares(hypotheses), strict=True)
    needed = [time.needed(look, last, finest) for time, last in each if time.at(look).se]
    known = [max(n, FEWEST) for n in needed if n is not None]
    known = known if len(known) == len(needed) else []
    return GateJudgement(
        **asdict(found),
        verdict=verdict,
        reason=_slower(one, look, slower.left[name], found, *means)
        if verdict is GateVerdict.REGRESSION
        else _reason(verdict, one, look, passes.left[name], known),
        pairs=first.at(look).n,
        more=more if undecided else 0,
        suspect=undecided and more > 0 and pairs >= SUSPECT_FROM and any(t.latest.log_ratio > t.bar for t in one.times),
        mean=means[0] if means else None,
        needed=max(known, default=None),
    )


def _slower(one: TrialRatios, look: int, left: int, found: MeasuredRatio, mean: MeasuredRatio | None = None) -> str:
    """By which factor a REGRESSION is slower, with its interval; left: how many hypotheses shared alpha."""
    typical, *_ = one.slower_by(left)
    pairs = _pairs(one.times[0].at(look).n)
    if typical is None or typical > look:
        assert mean is not None
        assert found.ratio is not None
        said = f"{_factor(mean)} over all calls on average, above {_percent(one.times[1].bar)} ({pairs})"
        return f"{said}, though its typical ones take {100 * (found.ratio - 1):+.2f} %"
    also = "" if mean is None else f", over all calls on average {_factor(mean)}"
    return f"{_factor(found)}, above the margin of {_percent(one.times[0].bar)} ({pairs}){also}"


def _factor(found: MeasuredRatio) -> str:
    interval = "" if found.low is None or found.high is None else f" [{found.low:.3f}, {found.high:.3f}]"
    return f"{found.ratio:.3f} times as slow{interval}"


def _reason(verdict: GateVerdict, one: TrialRatios, look: int, passes: int, needed: Sequence[int]) -> str:
    """Why it is no REGRESSION; passes: how many hypotheses shared alpha."""
    found, *means = (time.at(look) for time in one.times)
    over = f"{_difference(found)} over {_pairs(found.n)}"
    also = f", all calls on average {_difference(means[0])}" if means else ""
    if verdict is GateVerdict.IMPROVED:
        return f"faster: {over}{also}"
    if verdict is GateVerdict.PASS:
        return f"not slower by {_percent(one.times[0].bar)}: {over}{also}"
    if not found.se:
        twice = ". Are these the same records twice?" if found.log_ratio == 0 else ""
        return (
            f"{_pairs(found.n)} of ratio {found.ratio:.6g}: they do not vary, so nothing says how sure that is{twice}"
        )
    if found.n < FEWEST:
        return f"{_difference(found)} over {_too_few(found.n)}"
    said = [
        _why_undecided(time, look, "all calls on average " * number)
        for number, (time, at) in enumerate(zip(one.times, one.passes_by(passes), strict=True))
        if at is None
    ]
    more = f"{max(needed)} pairs would decide it in 80 % of cases" if needed else "no number of pairs would decide it"
    if needed and max(needed) <= found.n:
        more = "so many decide it in 80 % of cases, not in this one: measure again"
    return f"{'; '.join(said)}. {more[0].upper()}{more[1:]}"


def _why_undecided(time: LogRatios, look: int, who: str) -> str:
    """Why a time is not told from its bar: the noise, and what must be allowed for between the pairs."""
    found = time.at(look)
    noise = f"by a noise of {100 * found.sd:.2g} % a pair over {_pairs(found.n)}"
    wide = f"interval {found.widened:.2g} times as wide"
    why = f"; pairs may resemble the ones before (autocorrelation up to {found.alike:.2f}): {wide}"
    why = why if found.widened >= WORTH_SAYING else ""
    return f"{who}{_difference(found)} is not told from {_percent(time.bar)} {noise}{why}"


def _difference(found: Estimate) -> str:
    return f"{100 * (found.ratio - 1):+.2f} %"


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):.3g} %"


def _too_few(n: int) -> str:
    return f"{_pairs(n)}: it takes {FEWEST} at least"


def _pairs(n: int) -> str:
    return f"{n} pair{'' if n == 1 else 's'}"
