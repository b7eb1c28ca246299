"""Does a candidate end where its control ends: two one-sided t-tests of final losses, and Holm over the candidates.

The gap is candidate - control in the unit of the losses (nat): above 0 is worse. A claim is made only where its own test
rejects; that a difference was not significant is no claim. After Schuirmann 1987, J. Pharmacokinet. Biopharm. 15:657.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from te_bench.reports.power import detectable, exact_power, seeds_beyond, seeds_needed

Array = NDArray[np.float64]

RESAMPLES = 9999
FEWEST_RESAMPLED = 4  # of 3 runs one resample in 9 is one run three times: more than the 5 % that an end cuts off
SAME = 1e-12  # a spread below this share of the losses is rounding of the subtraction
LARGEST = 1e100  # a loss whose square is a number still


class Verdict(StrEnum):
    """What the runs carry: within the margin either way, not worse by it, worse by it, broken, or too little to say."""

    EQUIVALENT = "EQUIVALENT"
    NON_INFERIOR = "NON_INFERIOR"
    INFERIOR = "INFERIOR"
    DIVERGED = "DIVERGED"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """p-values: of -margin < gap < margin (the larger of its two one-sided), gap < margin, and gap > margin."""

    equivalent: float
    non_inferior: float
    inferior: float

    def verdict(self, alpha: float) -> Verdict:
        if self.equivalent <= alpha:
            return Verdict.EQUIVALENT
        if self.non_inferior <= alpha:
            return Verdict.NON_INFERIOR
        return Verdict.INFERIOR if self.inferior <= alpha else Verdict.INCONCLUSIVE


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One candidate against its control. None is what gaps that do not vary, or too few, cannot tell."""

    n: int  # pairs; unpaired, runs of the candidate
    n_control: int
    paired: bool
    margin: float
    alpha: float
    gap: float  # mean of candidate - control
    sd: float  # of the gap of one pair
    interval: tuple[float, float] | None  # t, 1 - 2 alpha
    bootstrap: tuple[float, float] | None  # studentised, 1 - 2 alpha
    p_equivalence: float
    p_non_inferior: float
    p_inferior: float
    correlation: float | None  # of the pairs
    power: float | None  # to show equivalence with these n and sd at a true gap of 0
    detectable: float | None  # the smallest margin that has 80 % power with these n and sd
    seeds_needed: int | None  # for 80 % power with this sd at a true gap of 0
    seeds_needed_at_gap: int | None  # to show what the gap as measured is: within the margin, or beyond it
    verdict: Verdict
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """One candidate among a family of them: p-values after Holm; nothing but the reason for one that diverged."""

    verdict: Verdict
    reason: str
    family: int  # candidates judged together
    comparison: Comparison | None = None
    p_equivalence: float | None = None
    p_non_inferior: float | None = None
    p_inferior: float | None = None
    seeds_needed: int | None = None  # to show what the gap as measured is, whatever the other candidates do


@dataclass(frozen=True, kw_only=True, slots=True)
class _Estimate:
    """Mean gap with its standard error and degrees of freedom, from samples whose means add up to it."""

    samples: tuple[Array, ...]
    gap: float
    sd: float
    se: float
    df: float


def compare(
    candidate: Sequence[float],
    control: Sequence[float],
    *,
    margin: float,
    alpha: float = 0.05,
    paired: bool = True,
) -> Comparison:
    """EQUIVALENT when the t-tests of gap < margin and of gap > -margin reject at alpha: TOST; n losses an arm.

    Paired, run i of both arms shares its seed (initial weights, data order): the t-test of the differences, n - 1
    degrees of freedom. Unpaired, Welch's with Satterthwaite's. EQUIVALENT and NON_INFERIOR both need the test of
    gap < margin to reject, so a candidate that is worse by the margin or more gets either in at most alpha of cases.

    The bootstrap interval beside it is studentised: at n = 5, where it matters, 90 % intervals covered the mean of
    normal and of exponential gaps in 92 % and 90 % of 600 simulations, BCa's in 80 % and 75 %, t in 91 % and 84 %.

    Gaps that do not vary carry no standard error: INCONCLUSIVE, except where every pair ended on the very same loss
    though the seeds differ, which says that both arms computed the same: EQUIVALENT. An arm whose runs all ended on one
    loss is one run, counted several times: INCONCLUSIVE too.

    Raises ValueError for a margin that is not positive, alpha outside (0, 0.5), fewer than 2 runs, unequal lengths
    when paired, and a loss that is not finite or above 1e100.
    """
    check_test(margin, alpha)
    arms = _arms(candidate, control, paired)
    estimate = _paired(arms[0] - arms[1]) if paired else _welch(*arms)
    same = bool(np.all(arms[0] == arms[1])) if paired else False
    copied = any(np.ptp(arm) == 0 for arm in arms)
    if copied or estimate.sd <= SAME * max(float(np.abs(arm).max()) for arm in arms):
        return _degenerate(
            estimate, arms, same=same and bool(np.ptp(arms[1]) > 0), margin=margin, alpha=alpha, paired=paired
        )
    claims = claims_of(estimate.gap, estimate.se, estimate.df, margin)
    reach = float(stdtrit(estimate.df, 1 - alpha)) * estimate.se
    interval = estimate.gap - reach, estimate.gap + reach
    at_gap = _needed(estimate.gap, estimate.sd, margin, alpha, paired)
    verdict = claims.verdict(alpha)
    return Comparison(
        n=arms[0].size,
        n_control=arms[1].size,
        paired=paired,
        margin=margin,
        alpha=alpha,
        gap=estimate.gap,
        sd=estimate.sd,
        interval=interval,
        bootstrap=_studentised(estimate, alpha),
        p_equivalence=claims.equivalent,
        p_non_inferior=claims.non_inferior,
        p_inferior=claims.inferior,
        correlation=_correlation(*arms) if paired else None,
        power=exact_power(margin, se=estimate.se, df=estimate.df, alpha=alpha),
        detectable=detectable(se=estimate.se, df=estimate.df, alpha=alpha),
        seeds_needed=seeds_needed(estimate.sd, margin, alpha=alpha, paired=paired),
        seeds_needed_at_gap=at_gap,
        verdict=verdict,
        reason=_reason(verdict, estimate.gap, interval, margin, alpha, at_gap),
    )


def judge(
    arms: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    margin: float,
    alpha: float = 0.05,
    paired: bool = True,
    diverged: Mapping[str, str] | None = None,
) -> dict[str, Judgement]:
    """Verdicts over a family of candidates {name: (candidate, control)} from p-values after Holm, a claim at a time.

    Holm is applied three times, over the candidates' p-values of each claim: equivalent, non-inferior, inferior. What
    must not happen, a candidate called EQUIVALENT or NON_INFERIOR though its gap is the margin or more, happens
    for any of them with a probability of at most alpha: p_equivalence >= p_non_inferior for every candidate, Holm's
    adjusted p-values rise with each p-value, so whatever is EQUIVALENT has also been rejected by the Holm procedure of
    the non-inferiority claims, and that one holds the family at alpha (Holm 1979; no independence needed, so a
    shared control is no matter). Likewise EQUIVALENT outside of the margin on either side, and INFERIOR within it.

    `diverged` gives candidates that broke, with the reason: DIVERGED whatever losses they have, for the runs that
    survived are a biased choice. They stay in the family, with p = 1: its size was fixed before the first step.
    Raises what `compare` raises, with the candidate's name, and ValueError for no candidate.
    """
    broken = dict(diverged or {})
    names = list(dict.fromkeys([*arms, *broken]))
    if not names:
        raise ValueError("no candidate to judge: give at least one arm besides the control")
    check_test(margin, alpha)
    compared = {name: _named(name, arms[name], margin, alpha, paired) for name in names if name not in broken}
    adjusted = [
        _holm([getattr(compared[name], claim) if name in compared else 1.0 for name in names])
        for claim in ("p_equivalence", "p_non_inferior", "p_inferior")
    ]
    judged = {}
    for name, equivalent, non_inferior, inferior in zip(names, *adjusted, strict=True):
        if name in broken:
            judged[name] = Judgement(verdict=Verdict.DIVERGED, reason=broken[name], family=len(names))
        else:
            claims = Claims(equivalent=equivalent, non_inferior=non_inferior, inferior=inferior)
            judged[name] = _judged(compared[name], claims, len(names))
    return judged


def _judged(c: Comparison, claims: Claims, family: int) -> Judgement:
    verdict, reason, needed = claims.verdict(c.alpha), c.reason, None
    if c.interval is not None:
        # Holm's hardest step, so enough whichever rank the candidate takes
        needed = _needed(c.gap, c.sd, c.margin, c.alpha / family, c.paired)
        reason = _reason(verdict, c.gap, c.interval, c.margin, c.alpha, needed)
    if verdict is not c.verdict:
        reason = f"{c.verdict} on its own, not after Holm over {family} candidates: {reason}"
    return Judgement(
        verdict=verdict,
        reason=reason,
        family=family,
        comparison=c,
        p_equivalence=claims.equivalent,
        p_non_inferior=claims.non_inferior,
        p_inferior=claims.inferior,
        seeds_needed=needed,
    )


def check_test(margin: float, alpha: float) -> None:
    """Raises ValueError for a margin that is not positive and finite, and an alpha outside of (0, 0.5)."""
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"margin {margin}: give the largest gap in loss that you would accept, above 0, such as 0.003")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha {alpha}: give an error rate between 0 and 0.5, such as 0.05")


def claims_of(gap: float, se: float, df: float, margin: float) -> Claims:
    """One-sided p-values of the t statistics (gap +- margin) / se with df degrees of freedom."""
    below, above = float(stdtr(df, (gap - margin) / se)), float(stdtr(df, -(gap + margin) / se))
    return Claims(equivalent=max(below, above), non_inferior=below, inferior=float(stdtr(df, (margin - gap) / se)))


def _arms(candidate: Sequence[float], control: Sequence[float], paired: bool) -> tuple[Array, Array]:
    arms = _arm(candidate, "candidate"), _arm(control, "control")
    if paired and arms[0].size != arms[1].size:
        raise ValueError(
            f"{arms[0].size} candidate and {arms[1].size} control runs cannot be paired: give both arms the same seeds, "
            "or compare them unpaired"
        )
    return arms


def _arm(losses: Sequence[float], arm: str) -> Array:
    values = np.asarray(losses, dtype=np.float64)
    for place in np.flatnonzero(~np.isfinite(values)):
        raise ValueError(
            f"{arm}, run {place + 1} of {values.size}: the loss is {values[place]}. A run that broke is judged as "
            "diverged; it has no final loss"
        )
    for place in np.flatnonzero(np.abs(values) > LARGEST):
        raise ValueError(
            f"{arm}, run {place + 1} of {values.size}: {values[place]:g} is no loss; write nan where it diverged"
        )
    if values.size < 2:
        raise ValueError(f"{values.size} {arm} run: a verdict needs 2 seeds at least, and 5 to be worth much")
    return values


def _named(
    name: str, arms: tuple[Sequence[float], Sequence[float]], margin: float, alpha: float, paired: bool
) -> Comparison:
    try:
        return compare(*arms, margin=margin, alpha=alpha, paired=paired)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted: max over the i-th smallest at most as large of (m - i) p_i, i from 0, at most 1 (Holm 1979).

    statsmodels' multipletests, which the tests hold it to, takes a second to import and collects garbage at each call.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)).clip(max=1.0)
    return [float(one) for one in adjusted]


def _paired(gaps: Array) -> _Estimate:
    sd = float(gaps.std(ddof=1))
    return _Estimate(samples=(gaps,), gap=float(gaps.mean()), sd=sd, se=sd / math.sqrt(gaps.size), df=gaps.size - 1)


def _welch(candidate: Array, control: Array) -> _Estimate:
    """Welch 1947, Biometrika 34:28, with Satterthwaite's degrees of freedom."""
    variances = [float(arm.var(ddof=1)) for arm in (candidate, control)]
    parts = [variance / arm.size for variance, arm in zip(variances, (candidate, control), strict=True)]
    total = sum(parts)
    spread = candidate.size - 1, control.size - 1
    df = total**2 / sum(part**2 / own for part, own in zip(parts, spread, strict=True)) if total else sum(spread)
    return _Estimate(
        samples=(candidate, -control),
        gap=float(candidate.mean() - control.mean()),
        sd=math.sqrt(sum(variances)),
        se=math.sqrt(total),
        df=df,
    )


def _correlation(candidate: Array, control: Array) -> float | None:
    if not (np.ptp(candidate) and np.ptp(control)):
        return None
    return float(np.corrcoef(candidate, control)[0, 1])


def _studentised(estimate: _Estimate, alpha: float) -> tuple[float, float] | None:
    """gap - t* se, t* the quantiles of (gap* - gap) / se* over resamples of the runs (Efron & Tibshirani 1993, 12.5).

    The same losses give the same interval: the resamples are drawn from a fixed seed.
    """
    if min(sample.size for sample in estimate.samples) < FEWEST_RESAMPLED:
        return None
    draw = np.random.default_rng(0)
    means, variance = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for sample in estimate.samples:
        again = sample[draw.integers(0, sample.size, (RESAMPLES, sample.size))]
        means += again.mean(axis=1)
        variance += again.var(axis=1, ddof=1) / sample.size
    off = means - estimate.gap
    varied = (
        variance > (SAME * estimate.se) ** 2
    )  # else every run drawn is the same one: infinitely far, in its direction
    t = np.where(varied, off / np.sqrt(np.where(varied, variance, 1)), np.copysign(np.inf, off))
    low, high = np.quantile(t, [alpha, 1 - alpha], method="inverted_cdf")
    return estimate.gap - float(high) * estimate.se, estimate.gap - float(low) * estimate.se


def _degenerate(
    estimate: _Estimate, arms: tuple[Array, Array], *, same: bool, margin: float, alpha: float, paired: bool
) -> Comparison:
    """Gaps without any spread: no t-test. `same`: bit for bit the same losses in both arms, over seeds that differ."""
    if same:
        reason = f"all {arms[0].size} pairs ended on the very same loss: both arms computed the same"
    elif paired:
        reason = f"all {arms[0].size} gaps are {estimate.gap:.3g}: they do not vary, so nothing says how sure that is. "
        reason += "Check that the runs differ in their seeds"
    if not same and (copied := [arm.size for arm in arms if np.ptp(arm) == 0]):
        reason = (
            f"all {copied[0]} runs of an arm ended on the very same loss, so nothing says how far seeds move it: check that "
            "they differ in their seeds"
        )
    return Comparison(
        n=arms[0].size,
        n_control=arms[1].size,
        paired=paired,
        margin=margin,
        alpha=alpha,
        gap=estimate.gap,
        sd=0.0,
        interval=None,
        bootstrap=None,
        p_equivalence=0.0 if same else 1.0,
        p_non_inferior=0.0 if same else 1.0,
        p_inferior=1.0,
        correlation=_correlation(*arms) if paired else None,
        power=None,
        detectable=None,
        seeds_needed=None,
        seeds_needed_at_gap=None,
        verdict=Verdict.EQUIVALENT if same else Verdict.INCONCLUSIVE,
        reason=reason,
    )


def _needed(gap: float, sd: float, margin: float, alpha: float, paired: bool) -> int | None:
    """Seeds to show EQUIVALENT with 80 % power if that is the true gap; beyond the margin INFERIOR, or NON_INFERIOR."""
    if abs(gap) < margin:
        return seeds_needed(sd, margin, gap=gap, alpha=alpha, paired=paired)
    excess = gap - margin if gap > 0 else margin - gap
    return seeds_beyond(sd, excess, alpha=alpha, paired=paired)


def _reason(
    verdict: Verdict, gap: float, interval: tuple[float, float], margin: float, alpha: float, needed: int | None
) -> str:
    measured = f"gap {gap:+.2g}, {100 * (1 - 2 * alpha):.3g} % interval [{interval[0]:+.2g}, {interval[1]:+.2g}]"
    if verdict is Verdict.EQUIVALENT:
        return f"ends within {margin:g} of the control: {measured}"
    if verdict is Verdict.NON_INFERIOR:
        return f"ends less than {margin:g} above the control, and perhaps further than that below it: {measured}"
    if verdict is Verdict.INFERIOR:
        return f"ends more than {margin:g} above the control: {measured}"
    claim = Verdict.EQUIVALENT if abs(gap) < margin else Verdict.INFERIOR if gap > 0 else Verdict.NON_INFERIOR
    more = f"no number of seeds would show it {claim} if that is its true gap"
    if needed is not None:
        more = f"{needed} seeds an arm would show it {claim} in 80 % of cases if that is its true gap"
    what = f"tell whether the gap is more than {margin:g}" if interval[0] > 0 else f"tell {margin:g} from nothing"
    return f"too few seeds to {what}: {measured}; {more}"
