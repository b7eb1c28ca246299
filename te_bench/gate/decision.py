"""Decide which trials became slower: REGRESSION, PASS, IMPROVED or INCONCLUSIVE, and which trials need more pairs.

A trial has two ratios, candidate / baseline: r of its typical time, and m of the mean time over all its calls. The bar of
r is 1 + margin, that of m 1 + MEAN_MARGINS margins. Three claims are tested: r or m lies above its bar; both lie below;
r < 1. The first claim divides its share of alpha: two thirds for r, one third for m. The second divides nothing: if the
claim is wrong, one of its two parts is, and each part is wrong in at most alpha of cases (Berger 1982, Technometrics
24:295).

Each claim is held to alpha over all trials, their geometric mean and all looks together, by Holm's procedure over
group-sequential tests (Maurer & Bretz 2013, Stat. Biopharm. Res. 5:311; Ye, Li, Liu & Yao 2013, Stat. Med. 32:1112).
This is closed testing. Any k true hypotheses are rejected, at whatever look, with a probability of at most k times what
one spends at level alpha / k, however the trials depend on each other. The levels of all looks rise with alpha, so a
claim once made passes its share on to the undecided trials. Stopping a trial once it is decided, or the whole gate when
time is up, can only lose rejections. What was seen may choose the trial that gets the next pair: a look is a number of
the trial's own pairs, and a look that is never reached claims nothing.

The decision is a pure function of the ratios; the gate calls it again after every round of pairs. The width of a trial's
interval depends on the autocorrelation of all pairs so far, so the pairs of another trial can make or undo a claim.
docs/gate-statistics.md and tests/gate/test_gate_simulated.py have the simulated error rates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from te_bench.gate.looks import HolmClaim, LogRatios, MeasuredRatio, TrialRatios, divisor, holm
from te_bench.gate.question import ALPHA, FEWEST, MARGIN
from te_bench.gate.slowdown import Estimate, likeness

FAMILY = "geometric mean"
#: The mean over all calls must lie below 1 + this many margins. Its pairs vary by 0.8 to 10 times as much as those of the
#: lowest tenth, 1.4 times in the median.
MEAN_MARGINS = 2.5
WORTH_SAYING = 1.5  # the reason mentions intervals from this many times the width for independent pairs
SUSPECT_FROM = 3  # pairs; from 4 on, 78 % of slow-downs are found instead of 83 % (100 to 150 simulations)

Ratios = Mapping[str, Sequence[float | None]]


class GateVerdict(StrEnum):
    """REGRESSION: slower by more than the margin; PASS: not; IMPROVED: faster than the baseline; INCONCLUSIVE: unknown."""

    REGRESSION = "REGRESSION"
    PASS = "PASS"
    IMPROVED = "IMPROVED"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, kw_only=True, slots=True)
class GateJudgement(MeasuredRatio):
    """The judgement of one trial, or of the geometric mean over all: the ratio of typical times, and of all calls."""

    verdict: GateVerdict
    reason: str
    pairs: int  # used, up to this judgement's look
    more: int = 0  # pairs to the next look of an undecided trial; 0 if there is none
    suspect: bool = False  # undecided, and slower than the margin over all its pairs so far
    mean: MeasuredRatio | None = None  # over all calls; None if means are not judged
    needed: int | None = None  # pairs that would decide it in 80 % of cases if the measured ratios hold

    @property
    def passed(self) -> bool:
        return self.verdict in (GateVerdict.PASS, GateVerdict.IMPROVED)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateDecision:
    """The judgements by trial; `family`: that of the trials' geometric mean, None for a single trial."""

    trials: Mapping[str, GateJudgement]
    family: GateJudgement | None

    @property
    def judgements(self) -> dict[str, GateJudgement]:
        """Return the judgements of the trials and the family, by name."""
        return {**self.trials, **({FAMILY: self.family} if self.family else {})}

    @property
    def more(self) -> dict[str, int]:
        """Return {trial: pairs to its next look} of the undecided trials."""
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
    """Return a verdict for each trial on its ratios so far, candidate / baseline, in the order of the rounds of pairs.

    None in a trial's ratios is a round without a pair of that trial. means: of the same pairs, the ratios m of the mean
    over all calls. REGRESSION: r > 1 + margin or m > 1 + MEAN_MARGINS margin is shown. PASS: both are shown to be below.
    IMPROVED: r < 1 is shown too. Otherwise INCONCLUSIVE; `more` says how many pairs the trial lacks to its next look.

    `looks`: the numbers of used pairs at which a trial is judged, fixed before the first pair. Without them each trial is
    judged once, on all its pairs; that is valid only if nothing seen chose their number. ended: no more pairs will come,
    so each trial's last look is at the pairs that it has (`looks_until`). `mde`: the smallest distance from the margin
    that must be told apart; it bounds `needed`. Default: the margin, so that an unchanged program passes.

    The geometric mean is judged on the rounds in which every trial has a ratio, and asks for no pairs of its own: if all
    trials PASS, so does the mean. A trial with fewer than FEWEST pairs is INCONCLUSIVE, and still counts in the mean.

    Raise ValueError for a trial named FAMILY.
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
    """Return the log-ratios of each trial and, for several trials, of their mean. Raise ValueError as `decide` does."""
    if FAMILY in ratios:
        raise ValueError(f"a trial is called {FAMILY!r}, the name of the mean over the trials; rename the trial")
    kinds = [ratios] if means is None else [ratios, means]
    if len(ratios) > 1:
        kinds = [{**one, FAMILY: _mean_of_rounds(list(one.values()))} for one in kinds]
    bars = zip(kinds, (margin, MEAN_MARGINS * margin), (True, False), strict=False)
    times = [_build_series(kind, math.log1p(bar), trim, looks, ended) for kind, bar, trim in bars]
    return {name: TrialRatios(times=tuple(one[name] for one in times), alpha=alpha) for name in times[0]}


def _build_series(
    ratios: Ratios, bar: float, trim: bool, looks: Sequence[int] | None, ended: bool
) -> dict[str, LogRatios]:
    """Return the series of each trial and the family; the family's autocorrelation is bounded by its trials'."""
    found = {name: tuple(math.log(r) for r in values if r is not None) for name, values in ratios.items()}
    together = likeness([logs for name, logs in found.items() if name != FAMILY], trim=trim)
    series = {}
    for name, logs in found.items():
        # without looks: one look, out of reach of fewer pairs than FEWEST
        planned = (max(len(logs), FEWEST),) if looks is None else tuple(looks)
        at = looks_until(len(logs), planned) if ended else planned
        alike = together.bound(likeness([logs], trim=trim))
        series[name] = LogRatios(logs=logs, looks=at, bar=bar, trim=trim, alike=alike)
    return series


def looks_until(pairs: int, looks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the looks of a trial that ends after `pairs` pairs; the last look is there, if FEWEST allow a claim.

    It is as if the looks had been planned so, because the clock does not know the ratios. Claims already made stand: the
    levels of the looks rise when fewer pairs are to come. If suspects run first, the ratios do influence when a trial
    ends; simulated gates (tests/gate/test_decision.py) err no more often for that.
    """
    return looks if not FEWEST <= pairs < looks[-1] else (*(look for look in looks if look < pairs), pairs)


def _mean_of_rounds(trials: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the geometric mean of each round over the trials; None if a trial has no ratio in that round."""
    found: list[float | None] = []
    for values in zip(*trials, strict=False):  # a decided trial has no later rounds
        known = [math.log(ratio) for ratio in values if ratio is not None]
        found.append(math.exp(math.fsum(known) / len(known)) if len(known) == len(trials) else None)
    return found


def _judge(
    name: str, one: TrialRatios, slower: HolmClaim, passes: HolmClaim, faster: HolmClaim, finest: float, hypotheses: int
) -> GateJudgement:
    """Return the verdict of one trial: the claim made of it; REGRESSION wins over PASS if both were made."""
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
    """Say by which factor a REGRESSION is slower, with its interval. left: how many hypotheses shared alpha."""
    typical, *_ = one.slower_by(left)
    pairs = _pairs(one.times[0].at(look).n)
    if typical is None or typical > look:
        assert mean is not None
        assert found.ratio is not None
        said = f"{_factor(mean)} over all calls on average, above {_percent(one.times[1].bar)} ({pairs})"
        return f"{said}, though typical calls take {100 * (found.ratio - 1):+.2f} %"
    also = "" if mean is None else f", over all calls on average {_factor(mean)}"
    return f"{_factor(found)}, above the margin of {_percent(one.times[0].bar)} ({pairs}){also}"


def _factor(found: MeasuredRatio) -> str:
    interval = "" if found.low is None or found.high is None else f" [{found.low:.3f}, {found.high:.3f}]"
    return f"{found.ratio:.3f} times as slow{interval}"


def _reason(verdict: GateVerdict, one: TrialRatios, look: int, passes: int, needed: Sequence[int]) -> str:
    """Give the reason of a verdict other than REGRESSION. passes: how many hypotheses shared alpha."""
    found, *means = (time.at(look) for time in one.times)
    over = f"{_difference(found)} over {_pairs(found.n)}"
    also = f", all calls on average {_difference(means[0])}" if means else ""
    if verdict is GateVerdict.IMPROVED:
        return f"faster: {over}{also}"
    if verdict is GateVerdict.PASS:
        return f"not slower by {_percent(one.times[0].bar)}: {over}{also}"
    if not found.se:
        twice = ". Are these the same records twice?" if found.log_ratio == 0 else ""
        return f"{_pairs(found.n)} of ratio {found.ratio:.6g}: without variation there is no error estimate{twice}"
    if found.n < FEWEST:
        return f"{_difference(found)} over {_too_few(found.n)}"
    said = [
        _why_undecided(time, look, "all calls on average " * number)
        for number, (time, at) in enumerate(zip(one.times, one.passes_by(passes), strict=True))
        if at is None
    ]
    more = f"{max(needed)} pairs would decide it in 80 % of cases" if needed else "no number of pairs would decide it"
    if needed and max(needed) <= found.n:
        more = "so many pairs decide it in 80 % of cases, not in this one: measure again"
    return f"{'; '.join(said)}. {more[0].upper()}{more[1:]}"


def _why_undecided(time: LogRatios, look: int, who: str) -> str:
    """Say why a time cannot be told from its bar: the noise, and the allowance for correlated pairs."""
    found = time.at(look)
    noise = f"by a noise of {100 * found.sd:.2g} % a pair over {_pairs(found.n)}"
    wide = f"interval {found.widened:.2g} times as wide"
    why = f"; successive pairs may correlate (autocorrelation up to {found.alike:.2f}): {wide}"
    why = why if found.widened >= WORTH_SAYING else ""
    return f"{who}{_difference(found)} is not told from {_percent(time.bar)} {noise}{why}"


def _difference(found: Estimate) -> str:
    return f"{100 * (found.ratio - 1):+.2f} %"


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):.3g} %"


def _too_few(n: int) -> str:
    return f"{_pairs(n)}: a verdict needs at least {FEWEST}"


def _pairs(n: int) -> str:
    return f"{n} pair{'' if n == 1 else 's'}"
