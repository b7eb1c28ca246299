"""Which trials became slower: every trial's pairs so far to REGRESSION, PASS, IMPROVED or INCONCLUSIVE, and who needs more.

Three claims are tested of each trial's ratio r = candidate / baseline: r > 1 + margin, r < 1 + margin and r < 1. Each is
held to alpha over all trials, their geometric mean and all looks together, by Holm's procedure over group-sequential
tests (Maurer & Bretz 2013, Stat. Biopharm. Res. 5:311; Ye, Li, Liu & Yao 2013, Stat. Med. 32:1112). Why that holds: it is
closed testing. Any k true hypotheses are rejected, at whatever look, with a probability of at most k times what one
spends at level alpha / k, however the trials depend on each other; and the levels of every look rise with alpha, so what
is rejected at alpha / k is rejected at alpha / (k - 1) too, which lets a claim that has been made pass its share on to
the trials still undecided. Stopping a trial once it is decided, or the whole gate when time is up, only loses rejections.

Which trial gets the next pair may depend on what was seen: a look is a number of the trial's own pairs, and one that is
never reached claims nothing. Trials that seem slower than the margin (`Judgement.suspect`) go before the others: a
slow-down of 5 % in one of six trials, of pairs that vary by 3.3 %, is found in three minutes in 98 % of gates, and in half
of them when all take turns until the end (150 and 100 simulations, 2026-11-22).

It is a pure function of the ratios, so the gate calls it again with every round of pairs. In 2,000 simulated
gates of 6 trials, looks at 6, 10, 15 and 20 pairs, sd 1.5 %, margin 2 % (2026-11-21; tests/reports/test_gate.py):

    in %, with log-ratios                    normal   Student's t, 3 df   1 pair in 20 is 10 x as wide
    no change: any trial REGRESSION             0.0                 0.0                            0.0
               any called IMPROVED              0.3                 0.1                            0.5
               all PASS                       100.0                92.9                           97.7
    all slower by just the margin:
               any REGRESSION                   5.0                 3.1                            4.5
               any PASS                         4.1                 3.5                            3.9
    one slower by 5 %: it is REGRESSION       100.0                99.7                           99.5
    pairs a trial, no change                   14.2                15.4                           14.7

The worst found: processes that run at either of two speeds 5 % apart, by chance, 12 trials and one look at 6 pairs: any
REGRESSION without a change in 5.7 %, any PASS at the margin in 5.1 %; 6 trials at the looks above: 0.0 and 6.4 %;
1 trial: any PASS in 6.8 %.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from te_bench.reports.sequential import t_levels
from te_bench.reports.slowdown import Estimate, detectable, estimate, plan_pairs

FAMILY = "geometric mean"
#: Pairs without which nothing is claimed. Where processes of one program run at either of two speeds, as memory happens to
#: be laid out, all of n pairs show the same difference in up to 4^-n of cases: 0.1 %, which no noise among them warns of.
FEWEST = 5
SUSPECT_FROM = 3  # pairs; from 4 on a slow-down of 5 % is found in 78 % of gates for 83 where pairs vary by 3.6 %
#: Holm's divisors of alpha. Between them the next larger is taken: a level takes 0.3 s to work out, and is kept.
_DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

Ratios = Mapping[str, Sequence[float | None]]


class Verdict(StrEnum):
    """Slower by more than the margin; not slower by it; faster than the baseline, so not slower either; not told yet."""

    REGRESSION = "REGRESSION"
    PASS = "PASS"
    IMPROVED = "IMPROVED"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What the pairs of one trial, or the rounds of all of them, carry. None is what too few pairs cannot tell.

    low, high: the bounds that were held to 1 + margin, at the one-sided level of the trial's look and Holm's step: above
    it in REGRESSION, below it in PASS.
    detectable: the smallest slow-down (0.03 is 3 %) that is found in 80 % of gates with this noise; by the pairs that
    there are, or by all that were planned where the trial was decided before.
    """

    verdict: Verdict
    reason: str
    pairs: int  # used, up to the look that this judgement is of
    more: int = 0  # pairs to the next look of an undecided trial; 0 when there is none
    suspect: bool = False  # still to be decided, and by all its pairs so far slower than the margin
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    needed: int | None = None  # pairs that would decide it in 80 % of cases at the ratio as measured

    @property
    def passed(self) -> bool:
        return self.verdict in (Verdict.PASS, Verdict.IMPROVED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The judgements by trial; `family`, of the geometric mean over the trials, is None for a single one."""

    margin: float
    alpha: float
    trials: Mapping[str, Judgement]
    family: Judgement | None

    @property
    def judgements(self) -> tuple[Judgement, ...]:
        return (*self.trials.values(), *([self.family] if self.family else []))

    @property
    def more(self) -> dict[str, int]:
        """{trial: pairs to its next look} of the trials that are still to be decided."""
        return {name: judgement.more for name, judgement in self.trials.items() if judgement.more}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Series:
    """The log-ratios of one hypothesis, the looks planned for it and the estimates of those it has reached."""

    logs: tuple[float, ...]
    looks: tuple[int, ...]

    @property
    def reached(self) -> list[Estimate]:
        return [estimate(self.logs[:n]) for n in self.looks if n <= len(self.logs)]

    def levels(self, alpha: float) -> tuple[float, ...]:
        return t_levels(self.looks, alpha)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Claim:
    """One claim over the family: the look at which it was made of a series, and the share of alpha of each."""

    made: Mapping[str, int]
    share: Mapping[str, float]


def decide(
    ratios: Ratios,
    *,
    margin: float = 0.02,
    alpha: float = 0.05,
    looks: Sequence[int] | None = None,
    ended: bool = False,
    mde: float | None = None,
) -> Decision:
    """A verdict for each trial on its ratios so far, candidate / baseline, in the order of the rounds of pairs.

    REGRESSION: r > 1 + margin is shown. PASS: r < 1 + margin is; IMPROVED: r < 1 as well. Else INCONCLUSIVE, and `more`
    says how many pairs the trial lacks to its next look. None in a trial's ratios is a round without a pair of it. `looks`
    are the numbers of used pairs at which a trial is judged, fixed before the first pair; without them each trial is judged
    once, on all it has, which is valid only where that number was not chosen by what was seen. ended: no more pairs will
    come, so that each trial's last look is at those it has (`looks_until`).

    The family's geometric mean is judged on the rounds in which every trial has a ratio, and asks for no pair of its own:
    when all trials PASS, so does it. A trial with fewer than FEWEST pairs is INCONCLUSIVE, and stays in the family. `mde`:
    how near to the margin a ratio need not be told from it, which bounds the pairs said to be needed; the margin itself
    if not given, so that an unchanged program passes.

    Raises ValueError for no trial, a ratio that is not above 0 and finite, and a margin, alpha, mde or looks out of range.
    """
    check_test(margin, alpha, mde)
    _check(ratios, looks)
    series = {name: _series(values, looks, ended) for name, values in ratios.items()}
    if len(ratios) > 1:
        series[FAMILY] = _series(_rounds(list(ratios.values())), looks, ended)
    bar = math.log1p(margin)
    slower = _holm(series, alpha, lambda e: e.p_above(bar))
    passes = _holm(series, alpha, lambda e: e.p_below(bar))
    faster = _holm(series, alpha, lambda e: e.p_below(0.0))
    finest = math.log1p(margin if mde is None else mde)
    judged = {
        name: _judge(name, one, slower, passes, faster, bar, finest, alpha / _divisor(len(series)))
        for name, one in series.items()
    }
    family = judged.pop(FAMILY, None) if len(ratios) > 1 else None
    if family and family.verdict is Verdict.INCONCLUSIVE and all(one.passed for one in judged.values()):
        family = replace(family, verdict=Verdict.PASS, reason="every trial passes, so their mean does", more=0)
    return Decision(margin=margin, alpha=alpha, trials=judged, family=family)


def check_test(margin: float, alpha: float, mde: float | None = None) -> None:
    """Raises ValueError for a margin or mde outside of (0, 1] and an alpha outside of (0, 0.5)."""
    for option, share in (("margin", margin), ("mde", mde)):
        if share is not None and not 0 < share <= 1:  # nor is NaN
            raise ValueError(f"{option} {share}: give a share above 0 and up to 1, such as 0.02 for 2 %")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha {alpha}: give an error rate between 0 and 0.5, such as 0.05")


def _check(ratios: Ratios, looks: Sequence[int] | None) -> None:
    if not ratios:
        raise ValueError("no trial to judge: give the ratios of one at least")
    if FAMILY in ratios:
        raise ValueError(f"a trial called {FAMILY!r}: that is what the mean over the trials is called; rename it")
    for name, values in ratios.items():
        for place, ratio in enumerate(values, start=1):
            if ratio is not None and not 0 < ratio < math.inf:
                raise ValueError(f"{name}, pair {place}: ratio {ratio}. Give seconds over seconds, or None for no pair")
    if looks is not None and (not looks or looks[0] < FEWEST or any(b <= a for a, b in pairwise(looks))):
        raise ValueError(f"looks at {list(looks)} pairs: give numbers that rise, from {FEWEST} pairs or more")


def _series(values: Sequence[float | None], looks: Sequence[int] | None, ended: bool) -> _Series:
    logs = tuple(math.log(ratio) for ratio in values if ratio is not None)
    once = (max(len(logs), FEWEST),)  # a look that fewer pairs do not reach
    planned = once if looks is None else tuple(looks)
    return _Series(logs=logs, looks=looks_until(len(logs), planned) if ended else planned)


def looks_until(pairs: int, looks: tuple[int, ...]) -> tuple[int, ...]:
    """The looks of a trial that ends after so many pairs: the last is there, if that is enough to claim anything.

    As if it had been planned so: the clock does not know the ratios. What was claimed before stays claimed, for the levels
    of the looks rise when fewer pairs are to come. Where suspects were run first, the ratios do have a say in when a trial
    ends; it costs no error that 2,000 simulations see (tests/reports/test_gate.py).
    """
    return looks if not FEWEST <= pairs < looks[-1] else (*(look for look in looks if look < pairs), pairs)


def _rounds(trials: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The geometric mean of each round over the trials; None where one of them has no ratio."""
    found: list[float | None] = []
    for values in zip(*trials, strict=False):  # a decided trial has no later rounds
        known = [math.log(ratio) for ratio in values if ratio is not None]
        found.append(math.exp(math.fsum(known) / len(known)) if len(known) == len(trials) else None)
    return found


def _divisor(hypotheses: int) -> int:
    return next((divisor for divisor in _DIVISORS if divisor >= hypotheses), hypotheses)


def _holm(series: Mapping[str, _Series], alpha: float, p_value: Callable[[Estimate], float]) -> _Claim:
    """Make one claim of as many series as Holm's procedure allows at the looks that they have reached."""
    found = {name: [p_value(e) for e in one.reached] for name, one in series.items()}
    made: dict[str, int] = {}
    share: dict[str, float] = {}
    while len(made) < len(series):
        step = alpha / _divisor(len(series) - len(made))
        share |= {name: step for name in series if name not in made}
        new = {}
        for name in series.keys() - made.keys():
            at = zip(found[name], series[name].levels(step), strict=False)
            look = next((k for k, (p, level) in enumerate(at) if p <= level), None)
            if look is not None:
                new[name] = look
        if not new:
            break
        made |= new
    return _Claim(made=made, share=share)


def _judge(
    name: str, one: _Series, slower: _Claim, passes: _Claim, faster: _Claim, bar: float, finest: float, alpha: float
) -> Judgement:
    """The verdict of one series: the claim that was made of it, REGRESSION before PASS should both have been."""
    more = next((n - len(one.logs) for n in one.looks if n > len(one.logs)), 0)
    if len(one.logs) < 2:
        return Judgement(verdict=Verdict.INCONCLUSIVE, reason=_few(len(one.logs)), pairs=len(one.logs), more=more)
    claim = slower if name in slower.made else passes
    reached = one.reached
    look = claim.made.get(name, max(len(reached) - 1, 0))
    found = reached[look] if reached else estimate(one.logs)
    verdict = Verdict.INCONCLUSIVE
    if name in claim.made:
        verdict = Verdict.REGRESSION if claim is slower else Verdict.PASS
        if claim is passes and faster.made.get(name, look + 1) <= look:
            verdict = Verdict.IMPROVED
    undecided = verdict is Verdict.INCONCLUSIVE
    below, above = (found.bound(one.levels(c.share[name])[look]) for c in (slower, passes))
    final = one.levels(alpha)[-1]
    away = detectable(found.sd, found.n if undecided else one.looks[-1], alpha=final)
    needed = plan_pairs(found.sd, max(abs(found.log_ratio - bar), finest), alpha=final) if found.se else None
    needed = None if needed is None else max(needed, FEWEST)
    return Judgement(
        verdict=verdict,
        reason=_reason(verdict, found, bar, needed),
        pairs=found.n,
        more=more if undecided else 0,
        suspect=undecided and more > 0 and len(one.logs) >= SUSPECT_FROM and estimate(one.logs).log_ratio > bar,
        ratio=found.ratio,
        low=math.exp(found.log_ratio - below) if found.se else None,
        high=_told(math.exp, found.log_ratio + above) if found.se else None,
        detectable=None if away is None or not found.se else _told(math.expm1, bar + away),
        needed=needed,
    )


def _told(of: Callable[[float], float], log_ratio: float) -> float | None:
    """exp or expm1; None for what is beyond a factor of 1000: two pairs say nothing."""
    return of(log_ratio) if log_ratio < math.log(1000) else None


def _reason(verdict: Verdict, found: Estimate, bar: float, needed: int | None) -> str:
    margin = f"{100 * math.expm1(bar):.3g} %"
    measured = f"{100 * (found.ratio - 1):+.2f} % over {_pairs(found.n)}"
    if verdict is Verdict.REGRESSION:
        return f"slower by more than {margin}: {measured}"
    if verdict is Verdict.IMPROVED:
        return f"faster: {measured}"
    if verdict is Verdict.PASS:
        return f"not slower by {margin}: {measured}"
    if not found.se:
        twice = ". Are these the same records twice?" if found.log_ratio == 0 else ""
        return (
            f"{_pairs(found.n)} of ratio {found.ratio:.6g}: they do not vary, so nothing says how sure that is{twice}"
        )
    if found.n < FEWEST:
        return f"{100 * (found.ratio - 1):+.2f} % over {_few(found.n)}"
    nearness = f"{measured} is not told from {margin} by a noise of {100 * found.sd:.2g} % a pair"
    more = f"{needed} pairs would decide it in 80 % of cases" if needed else "no number of pairs would decide it"
    if needed is not None and needed <= found.n:
        more = "so many decide it in 80 % of cases, not in this one: measure again"
    return f"{nearness}; {more}"


def _few(n: int) -> str:
    return f"{_pairs(n)}: it takes {FEWEST} at least"


def _pairs(n: int) -> str:
    return f"{n} pair{'' if n == 1 else 's'}"
