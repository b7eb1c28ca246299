"""Test whether a candidate ends where its control ends: two one-sided tests of final losses, Holm over the candidates.

The gap is candidate - control in the unit of the losses (nat): above 0 is worse. A claim is made only if its own test
rejects; a difference that is not significant is no claim. After Schuirmann 1987, J. Pharmacokinet. Biopharm. 15:657, with
tests that hold for skewed gaps too (`skewed`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from te_bench.reports.convergence.power import at_most, detectable, seeds_beyond, seeds_needed, tost_power
from te_bench.reports.convergence.skewed import FEWEST, LEAST_ALPHA, Mean, mean_of

Array = NDArray[np.float64]

SAME = 1e-12  # a spread below this share of the losses is rounding error
LARGEST = 1e60  # the cube of a larger loss overflows
ROUNDED = 5  # losses with at most so many decimals may be equal by chance; others are then one run
FAR = 0.01  # the probability that a normal sample has any outlier


class Verdict(StrEnum):
    """What the runs show: within the margin, not worse than it, worse than it, diverged, or too little to tell."""

    EQUIVALENT = "EQUIVALENT"
    NON_INFERIOR = "NON_INFERIOR"
    INFERIOR = "INFERIOR"
    DIVERGED = "DIVERGED"
    INCONCLUSIVE = "INCONCLUSIVE"


#: What a verdict says about the candidate's final loss, with `margin` and `control` to fill in.
CLAIMS = {
    Verdict.EQUIVALENT: "within {margin:g} nat of the {control}",
    Verdict.NON_INFERIOR: "less than {margin:g} nat above the {control}",
    Verdict.INFERIOR: "more than {margin:g} nat above the {control}",
    Verdict.INCONCLUSIVE: "not told from the margin {margin:g}",
}


@dataclass(frozen=True, slots=True)
class Claims:
    """The p-values of -margin < gap < margin (the larger of its two one-sided ones), gap < margin, and gap > margin."""

    equivalent: float
    non_inferior: float
    inferior: float

    def verdict(self, alpha: float) -> Verdict:
        if self.equivalent <= alpha:
            return Verdict.EQUIVALENT
        if self.non_inferior <= alpha:
            return Verdict.NON_INFERIOR
        return Verdict.INFERIOR if self.inferior <= alpha else Verdict.INCONCLUSIVE


UNCLAIMED = Claims(1.0, 1.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossComparison:
    """One candidate against its control. A field is None if the gaps are too few or do not vary."""

    n: int  # pairs; runs of the candidate if unpaired
    n_control: int
    paired: bool
    margin: float
    alpha: float
    gap: float  # mean of candidate - control
    sd: float = 0.0  # of the gap of one pair
    df: float = 0.0  # degrees of freedom of sd
    interval: tuple[float, float] | None = None  # 1 - 2 alpha, by the verdict's tests
    interval_95: tuple[float, float] | None = None  # two-sided, by the tests of `compare`, whatever alpha is
    t_interval: tuple[float, float] | None = None  # 1 - 2 alpha, Student's or Welch's: too narrow for skewed gaps
    claims: Claims = UNCLAIMED
    correlation: float | None = None  # between the losses of a pair
    # At the hardest step of Holm's procedure, alpha / family, with these n and sd:
    power: float | None = None  # to show equivalence at a true gap of 0
    detectable: float | None = None  # the smallest margin with 80 % power
    seeds_needed: int | None = None  # for 80 % power at a true gap of 0
    seeds_needed_at_gap: int | None = None  # to show that the measured gap is within the margin, or beyond it
    outliers: tuple[int, ...] = ()  # places of pairs with a gap far from the others'
    verdict: Verdict
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateVerdict:
    """One candidate of a family, with p-values after Holm; a diverged one has only a reason."""

    verdict: Verdict
    reason: str
    family: int  # number of candidates judged together: 1 for the primary, the others without the primary
    comparison: LossComparison | None = None
    claims: Claims | None = None
    #: Seeds to show that the measured gap is within the margin, or beyond it; None while it waits for the primary.
    seeds_needed: int | None = None
    waits: bool = False  # its own claim is shown, but the primary's is not


def compare(
    candidate: Sequence[float],
    control: Sequence[float],
    *,
    margin: float,
    alpha: float = 0.05,
    paired: bool = True,
    called: str = "control",
    family: int = 1,
) -> LossComparison:
    """Return the comparison of n losses an arm: EQUIVALENT if the tests of gap < margin and gap > -margin reject (TOST).

    Paired: run i of both arms shares its seed (initial weights, data order), and the differences are tested. Unpaired:
    Welch's test with Satterthwaite's degrees of freedom. EQUIVALENT and NON_INFERIOR both need the test of gap < margin to
    reject, so a candidate that is worse by the margin or more gets either in at most alpha of cases, for gaps as
    `skewed.ASSUMPTION` says. `called`: what reasons call the control.

    family: the candidates that Holm's procedure judges together. Power and what follows from it are at its hardest step, and
    the claims by themselves at alpha.

    INCONCLUSIVE without a test: 2 runs; gaps that do not vary; an arm that counts one run several times. But if every pair
    ended on the same loss and the seeds differ, both computed the same: EQUIVALENT.

    Needs at least two runs an arm, with finite losses, and equally many in both if paired. Raises ValueError for a loss
    above 1e60.
    """
    arms = _arm(candidate, "candidate"), _arm(control, called)
    gaps = arms[0] - arms[1] if paired else None
    gap = float(arms[0].mean() - arms[1].mean() if gaps is None else gaps.mean())
    sd = math.hypot(*(arm.std(ddof=1) for arm in arms)) if gaps is None else float(gaps.std(ddof=1))
    untold, same = _why_untested(arms, gap, sd, margin, paired, called)
    mean = None if untold else _welch(*arms) if gaps is None else mean_of(gaps)
    claims = claims_of(mean, margin) if mean else Claims(0.0, 0.0, 1.0) if same else UNCLAIMED
    interval = mean.interval(alpha) if mean else None
    student = float(stdtrit(mean.df, 1 - alpha)) * mean.se if mean else 0.0
    at_gap = _seeds_to_show(gap, sd, margin, alpha, paired) if mean else None
    cautious = _seeds_to_show(gap, at_most(sd, mean.df), margin, alpha, paired) if mean else None
    verdict = claims.verdict(alpha)
    return LossComparison(
        n=arms[0].size,
        n_control=arms[1].size,
        paired=paired,
        margin=margin,
        alpha=alpha,
        gap=gap,
        sd=sd if mean else 0.0,
        interval=interval,
        interval_95=mean.interval(0.025) if mean else None,
        t_interval=(mean.value - student, mean.value + student) if mean else None,
        claims=claims,
        correlation=_correlation(*arms) if paired else None,
        power=tost_power(margin, se=mean.se, df=mean.df, alpha=alpha / family) if mean else None,
        detectable=detectable(se=mean.se, df=mean.df, alpha=alpha / family) if mean else None,
        seeds_needed=seeds_needed(sd, margin, alpha=alpha / family, paired=paired) if mean else None,
        seeds_needed_at_gap=at_gap,
        outliers=outliers(gaps) if mean and gaps is not None else (),
        verdict=verdict,
        df=mean.df if mean else 0.0,
        reason=untold or _reason(verdict, gap, interval, margin, alpha, (at_gap, cautious), called),
    )


def judge(
    arms: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    margin: float,
    alpha: float = 0.05,
    paired: bool = True,
    diverged: Mapping[str, str] | None = None,
    primary: str | None = None,
) -> dict[str, CandidateVerdict]:
    """Return verdicts over a family {name: (candidate, control)}, by p-values after Holm for each claim.

    Holm is applied three times, over the candidates' p-values of each claim: equivalent, non-inferior, inferior. The
    probability that any candidate with a gap of the margin or more is called EQUIVALENT or NON_INFERIOR is at most alpha:
    each candidate's p-value of equivalent is at least that of non_inferior, and Holm's adjusted p-values rise with each
    p-value. So Holm's procedure for non-inferiority also rejects every EQUIVALENT candidate, and it holds the family at
    alpha (Holm 1979; candidates need not be independent, so they may share a control). Likewise for EQUIVALENT outside of
    the margin on either side, and INFERIOR within it.

    `primary` is judged first, at the whole of alpha. Others are EQUIVALENT or NON_INFERIOR only if it is too, which holds
    the family at alpha (serial gatekeeping, Westfall and Krishen 2001, J. Stat. Plan. Inference 99:25). INFERIOR is by
    Holm over all candidates.

    `diverged`: {candidate: reason}. They are DIVERGED whatever their losses, because the surviving runs are a biased
    choice. They stay in the family with p = 1, because its size was fixed before the first step.
    Raises what `compare` and `check_test` raise.
    """
    broken = dict(diverged or {})
    names = list(dict.fromkeys([*arms, *broken]))
    check_test(margin, alpha)
    first = primary if primary in names else None
    family = {name: 1 if name == first else len(names) - (first is not None) for name in names}
    compared = {
        name: compare(*arms[name], margin=margin, alpha=alpha, paired=paired, family=family[name])
        for name in names
        if name not in broken
    }
    found = {name: compared[name].claims if name in compared else UNCLAIMED for name in names}
    own = adjusted = every = after_holm(found)
    if first is not None:
        gate = found[first]
        own = after_holm({name: claims for name, claims in found.items() if name != first}) | {first: gate}
        own = {name: replace(own[name], inferior=every[name].inferior) for name in names}
        adjusted = {
            name: Claims(max(c.equivalent, gate.equivalent), max(c.non_inferior, gate.non_inferior), c.inferior)
            for name, c in own.items()
        }
    return {
        name: CandidateVerdict(verdict=Verdict.DIVERGED, reason=broken[name], family=family[name])
        if name in broken
        else _judged(compared[name], claims, own[name], family[name], len(names), first if name != first else None)
        for name, claims in adjusted.items()
    }


def _judged(
    c: LossComparison, claims: Claims, own: Claims, family: int, every: int, first: str | None
) -> CandidateVerdict:
    """Return the verdict; own: claims without the gate `first`; every: the number of all candidates, for INFERIOR."""
    verdict, held, reason, needed = claims.verdict(c.alpha), own.verdict(c.alpha), c.reason, None
    if c.interval is not None:
        # Holm's hardest step: these seeds suffice at any rank.
        level = c.alpha / (every if c.gap >= c.margin else family)
        needed = _seeds_to_show(c.gap, c.sd, c.margin, level, c.paired)
        cautious = _seeds_to_show(c.gap, at_most(c.sd, c.df), c.margin, level, c.paired)
        reason = _reason(held, c.gap, c.interval, c.margin, c.alpha, (needed, cautious))
        if first is not None and held is Verdict.INCONCLUSIVE and c.gap < c.margin:
            reason += f"; and it passes only where {first} does, which is judged first"
    if held is not c.verdict:
        over = every if c.verdict is Verdict.INFERIOR else family
        reason = f"{c.verdict} on its own, not after Holm over {over} candidates: {reason}"
    if held is not verdict:
        needed = None  # more of its own seeds do not help
        reason = f"would be {held}, but only if {first}, which is judged first, is too: {reason}"
    return CandidateVerdict(
        verdict=verdict,
        reason=reason,
        family=family,
        comparison=c,
        claims=claims,
        seeds_needed=needed,
        waits=held is not verdict,
    )


def check_test(margin: float, alpha: float) -> None:
    """Raise ValueError for a margin that is not positive and finite, or an alpha outside of [LEAST_ALPHA, 0.5)."""
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"margin {margin}: give the largest gap in loss that you would accept, above 0, such as 0.003")
    check_alpha(alpha, LEAST_ALPHA)


def check_alpha(alpha: float, least: float = 0.0) -> None:
    """Raise ValueError for an alpha that is not above 0, below `least`, or not below 0.5."""
    if not (0 < alpha < 0.5 and alpha >= least):
        lower = f"from {least:g} to below" if least else "between 0 and"
        raise ValueError(f"alpha {alpha:g}: give an error rate {lower} 0.5, such as 0.05")


def level(alpha: float) -> str:
    """Return the confidence of the interval that one-sided tests at alpha use in both directions: 90 %."""
    return f"{100 * (1 - 2 * alpha):.3g} %"


def in_words(gap: float, interval: tuple[float, float], alpha: float) -> str:
    return f"gap {gap:+.2g}, {level(alpha)} interval [{interval[0]:+.2g}, {interval[1]:+.2g}]"


def claims_of(mean: Mean, margin: float) -> Claims:
    """Return the one-sided p-values of a mean gap against the margin, in both directions."""
    below, above = mean.p_below(margin), mean.p_above(-margin)
    return Claims(max(below, above), below, mean.p_above(margin))


def outliers(gaps: Sequence[float] | Array) -> tuple[int, ...]:
    """Return the places of outlying gaps; a normal sample has any with a probability of FAR.

    Each gap is compared with the mean and spread of the others: a t-test with n - 2 degrees of freedom (Grubbs 1950),
    Bonferroni over the gaps. Fewer than 4 gaps have none.
    """
    x = np.asarray(gaps, dtype=np.float64)
    if x.size < FEWEST + 1:
        return ()
    d = x - x.mean()
    off = np.abs(d) * x.size / (x.size - 1)  # from the mean of the others
    squares = np.maximum(d @ d - np.abs(d) * off, 0)  # of the others about their mean
    spread = np.sqrt(squares / (x.size - 2)) * math.sqrt(1 + 1 / (x.size - 1))
    bound = -float(stdtrit(x.size - 2, FAR / (2 * x.size)))
    return tuple(int(i) for i in np.flatnonzero(off > bound * spread))


def copies(losses: Sequence[float] | Array) -> tuple[int, int] | None:
    """Return the places of two runs that are one run under two seeds, or None.

    Losses with more than ROUNDED decimals are not equal by chance; rounded ones may be, but not half of them.
    """
    seen: dict[float, int] = {}
    met = [(seen[x], i) for i, x in enumerate(map(float, losses)) if seen.setdefault(x, i) != i]
    whole = [pair for pair in met if round(float(losses[pair[1]]), ROUNDED) != float(losses[pair[1]])]
    return next(iter(whole or (met if 2 * len(seen) <= len(losses) else ())), None)


def _arm(losses: Sequence[float], arm: str) -> Array:
    values = np.asarray(losses, dtype=np.float64)
    for place in np.flatnonzero(np.abs(values) > LARGEST):
        raise ValueError(
            f"{arm}, run {place + 1} of {values.size}: {values[place]:g} is not a loss; write nan if the run diverged"
        )
    return values


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p-values: the running max of (m - i) p_i over sorted p-values, i from 0, at most 1 (Holm 1979).

    Tests compare it with statsmodels' multipletests, which takes a second to import and collects garbage at each call.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)).clip(max=1.0)
    return [float(one) for one in adjusted]


def after_holm(found: Mapping[str, Claims]) -> dict[str, Claims]:
    """Return the claims with p-values adjusted over the candidates, for each claim."""
    names = ("equivalent", "non_inferior", "inferior")
    adjusted = (holm([getattr(claims, name) for claims in found.values()]) for name in names)
    return {candidate: Claims(*p) for candidate, *p in zip(found, *adjusted, strict=True)}


def _welch(candidate: Array, control: Array) -> Mean:
    """Return the gap by Welch 1947, Biometrika 34:28, with Satterthwaite's df; third cumulants add with their signs."""
    means = [mean_of(arm) for arm in (candidate, control)]
    se = math.hypot(*(mean.se for mean in means))
    shares = [mean.se / se for mean in means]
    df = 1 / sum(share**4 / mean.df for share, mean in zip(shares, means, strict=True))
    third = [m.skewness * share**3 / math.sqrt(m.df + 1) for m, share in zip(means, shares, strict=True)]
    gap = means[0].value - means[1].value
    return Mean(value=gap, se=se, skewness=(third[0] - third[1]) * math.sqrt(df + 1), df=df)


def _correlation(candidate: Array, control: Array) -> float | None:
    if not (np.ptp(candidate) and np.ptp(control)):
        return None
    return float(np.corrcoef(candidate, control)[0, 1])


def _why_untested(
    arms: tuple[Array, Array], gap: float, sd: float, margin: float, paired: bool, called: str
) -> tuple[str | None, bool]:
    """Return why no test is possible, or None; and whether both arms ended on equal losses, over different seeds."""
    one = next((arm for arm in arms if np.ptp(arm) == 0), None)
    if one is not None:
        return (
            f"all {one.size} runs of a configuration ended on the very same loss, so nothing says how far seeds move it: "
            "check that they differ in their seeds"
        ), False
    for arm, name in zip(arms, ("candidate", called), strict=True):
        if pair := copies(arm):
            return (
                f"{name}: runs {pair[0] + 1} and {pair[1] + 1} ended on the very same loss, {arm[pair[0]]:.10g}: one run "
                "that counts several times says nothing of how far seeds move it. Take the copies out; of losses that were "
                "rounded give more decimals"
            ), False
    if paired and np.all(arms[0] == arms[1]):
        digits = next((n for n in range(ROUNDED) if np.all(arms[0] == arms[0].round(n))), ROUNDED)
        if 10.0**-digits > margin:
            return (
                f"all {arms[0].size} pairs ended on the very same loss, but losses of {digits} decimals hide a gap of the "
                f"margin {margin:g}: give more decimals"
            ), False
        return f"all {arms[0].size} pairs ended on the very same loss: both computed the same", True
    if sd <= SAME * max(float(np.abs(arm).max()) for arm in arms):
        return (
            f"all {arms[0].size} gaps are {gap:.3g}: they do not vary, so nothing says how sure that is. Check that "
            "the runs differ in their seeds"
        ), False
    if (fewest := min(arm.size for arm in arms)) < FEWEST:
        return f"{fewest} seeds do not show how skewed the gaps are: {FEWEST} are needed at least", False
    return None, False


def _seeds_to_show(gap: float, sd: float, margin: float, alpha: float, paired: bool) -> int | None:
    """Return the seeds for 80 % power at this true gap: for EQUIVALENT, or beyond the margin INFERIOR or NON_INFERIOR."""
    if abs(gap) < margin:
        return seeds_needed(sd, margin, gap=gap, alpha=alpha, paired=paired)
    excess = gap - margin if gap > 0 else margin - gap
    return seeds_beyond(sd, excess, alpha=alpha, paired=paired)


def _reason(
    verdict: Verdict,
    gap: float,
    interval: tuple[float, float] | None,
    margin: float,
    alpha: float,
    needed: tuple[int | None, int | None],
    called: str = "control",
) -> str:
    """Return the reason for a verdict; needed: seeds by the measured spread, and by its upper bound."""
    assert interval is not None
    measured = in_words(gap, interval, alpha)
    if verdict is not Verdict.INCONCLUSIVE:
        further = ""
        if verdict is Verdict.NON_INFERIOR:
            shown = interval[1] < -margin
            further = (
                ", and it ends further below than the margin" if shown else ", and perhaps further than that below it"
            )
        return f"ends {CLAIMS[verdict].format(margin=margin, control=called)}{further}: {measured}"
    claim = Verdict.EQUIVALENT if abs(gap) < margin else Verdict.INFERIOR if gap > 0 else Verdict.NON_INFERIOR
    more = f"no number of seeds would show it {claim} if that is its true gap"
    few, many = needed
    if few is not None:
        to = f" to {many}" if many is not None else " or more"
        more = f"{few}{to} seeds each would show it {claim} in 80 % of cases if that is its true gap"
    what = f"tell whether the gap is more than {margin:g}" if interval[0] > 0 else f"tell {margin:g} from nothing"
    return f"too few seeds to {what}: {measured}; {more}"
