"""Compute the power of an equivalence test of n seeds for normal gaps, and the margins and seeds with enough power.

The test is that of `skewed`. Its power is counted in simulated gaps. Searches use one `typical_reach` in place of a reach
that varies with the gaps' skewness, which is right at a power of 80 % and a true gap of 0. sd is always that of the gap
(candidate - control): of the pairs' differences or, unpaired, sqrt(sd_a^2 + sd_b^2) of one run an arm. Losses, gaps,
margins and standard deviations have one unit, usually nat.
"""

import bisect
import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, gammaln, nctdtr, ndtr

from te_bench.reports.convergence import skewed

Array = NDArray[np.float64]

POWER = 0.8  # the usual choice (Cohen 1988, Statistical Power Analysis, 2.4): four claims in five succeed
CAUTION = 0.8  # the confidence that the true spread is at most the planned one
MOST_SEEDS = 1_000_000  # searches for a number of seeds stop here

DRAWS = 20_000  # gives a power of 80 % within 0.6 points

_ORDER = 128  # agrees with adaptive quadrature to 1e-11, from 1 degree of freedom to 1000
_TAIL = 1e-12  # of the chi distribution, left out at both ends


@functools.cache
def legendre(order: int) -> tuple[Array, Array]:
    """Return (nodes, weights) of Gauss-Legendre quadrature over [-1, 1], cached: order 400 takes seconds on a busy CPU."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    return nodes, weights


def gap_sd(sd: float, correlation: float = 0.0) -> float:
    """Return sd sqrt(2 (1 - rho)): the standard deviation of candidate - control if each arm's runs vary by sd."""
    return sd * math.sqrt(2 * (1 - correlation))


def at_most(sd: float, df: float) -> float:
    """Return the upper bound, with confidence CAUTION, of a standard deviation estimated with df degrees of freedom."""
    return sd * math.sqrt(df / float(chdtri(df, CAUTION)))


@functools.lru_cache(maxsize=4096)  # searches and tables of one plan ask for the same designs again and again
def tost_power(margin: float, *, se: float, df: float, gap: float = 0.0, alpha: float = 0.05) -> float:
    """Return the probability of EQUIVALENT for an estimate N(gap, se^2) whose error has df degrees of freedom."""
    if int(df) + 1 < skewed.FEWEST:
        return 0.0
    below, above = _shown(min(int(df) + 1, skewed.MOST), alpha)
    return float(np.mean(np.maximum(below + gap / se, above - gap / se) <= margin / se))


@functools.lru_cache(maxsize=64)
def _shown(n: int, alpha: float) -> tuple[Array, Array]:
    """Return the least bounds, in standard errors, that simulated normal gaps of mean 0 are shown to lie within."""
    return skewed.shown(n, skewed.critical(n - 1, alpha), DRAWS)


def exact_power(margin: float, *, reach: float, df: float, gap: float = 0.0) -> float:
    """Return P(|estimate| + reach se < margin) for an estimate N(gap, 1) and se^2 chi^2_df / df, all in standard errors.

    It integrates over the chi distribution of se the normal probability of an estimate between both bounds. If reach is a
    quantile of Student's t, this is Owen's Q (Phillips 1990, J. Pharmacokinet. Biopharm. 18:137).
    """
    low = math.sqrt(chdtri(df, 1 - _TAIL) / df)
    high = min(math.sqrt(chdtri(df, _TAIL) / df), margin / reach)  # with a larger se no estimate is equivalent
    if high <= low:
        return 0.0
    nodes, weights = legendre(_ORDER)
    x = low + (high - low) * (nodes + 1) / 2  # se
    log_density = math.log(2) + df / 2 * math.log(df / 2) - gammaln(df / 2) + (df - 1) * np.log(x) - df * x**2 / 2
    inside = ndtr(margin - reach * x - gap) - ndtr(-margin + reach * x - gap)
    return float(np.sum(weights * np.exp(log_density) * inside) * (high - low) / 2)


def power(n: int, sd: float, margin: float, *, gap: float = 0.0, alpha: float = 0.05, paired: bool = True) -> float:
    """Return P(EQUIVALENT) of n pairs, or n runs an arm, at a true `gap`: n - 1 or 2 n - 2 degrees of freedom."""
    return tost_power(margin, se=sd / math.sqrt(n), df=_freedom(n, paired), gap=gap, alpha=alpha)


def detectable(*, se: float, df: float, alpha: float = 0.05) -> float | None:
    """Return the smallest margin with a power of POWER at a true gap of 0; None for 2 gaps."""
    if int(df) + 1 < skewed.FEWEST:
        return None
    return se * _detectable(df, alpha)


@functools.lru_cache(1024)  # arms with equal numbers of seeds share entries
def _detectable(df: float, alpha: float) -> float:
    """Return the detectable margin in standard errors."""
    reach = skewed.typical_reach(df, alpha)
    if math.isinf(reach):
        return math.inf
    furthest = reach * math.sqrt(chdtri(df, (1 - POWER) / 2) / df) + 10
    return _root(lambda margin: exact_power(margin, reach=reach, df=df) - POWER, 0, furthest)


def reach_of(margin: float, df: float) -> float:
    """Return the reach for which `margin`, in standard errors, is detectable."""
    return _root(lambda reach: exact_power(margin, reach=reach, df=df) - POWER, 1e-9, 2 * margin)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq  # here, because the import takes 0.25 s and not every report has a verdict

    return float(brentq(function, low, high))


def least_margin(chance: Callable[[float], float], least: float) -> float:
    """Return the smallest margin, within 0.1 %, whose chance is POWER, if it rises to 1 with the margin."""
    least, most = least / 2, least
    while chance(most) < POWER:
        most *= 1.5
    while most - least > 1e-3 * least:
        middle = (least + most) / 2
        least, most = (least, middle) if chance(middle) >= POWER else (middle, most)
    return most


def seeds_needed(sd: float, margin: float, *, gap: float = 0.0, alpha: float = 0.05, paired: bool = True) -> int | None:
    """Return the fewest pairs (runs an arm) with a power of POWER at a true `gap`; None if no number suffices."""
    if abs(gap) >= margin:
        return None

    def typical(n: int) -> float:
        df, se = _freedom(n, paired), sd / math.sqrt(n)
        if df + 1 < skewed.FEWEST:
            return 0.0
        return exact_power(margin / se, reach=skewed.typical_reach(df, alpha), df=df, gap=gap / se)

    return fewest(lambda n: typical(n) >= POWER, 2, MOST_SEEDS)


def seeds_beyond(sd: float, excess: float, *, alpha: float = 0.05, paired: bool = True) -> int | None:
    """Return the fewest pairs (runs an arm) whose one-sided test detects a true `excess` over a bound with power POWER."""
    if excess <= 0:
        return None

    def seen(n: int) -> float:
        df = _freedom(n, paired)
        if df + 1 < skewed.FEWEST:
            return 0.0
        return 1 - float(nctdtr(df, excess * math.sqrt(n) / sd, skewed.typical_reach(df, alpha)))

    return fewest(lambda n: seen(n) >= POWER, 2, MOST_SEEDS)


def two_figures(value: float, rounded: Callable[[float], int]) -> str:
    """Return a value above 0 with two figures: rounded by math.ceil if it is a minimum, by math.floor if a maximum."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{rounded(round(value / unit, 6)) * unit:.2g}"


def _freedom(n: int, paired: bool) -> int:
    return n - 1 if paired else 2 * n - 2


def fewest(enough: Callable[[int], bool], least: int, most: int) -> int | None:
    """Return the least number from `least` on that is enough, if all larger ones are too; None if `most` is not."""
    low = high = least
    while not enough(high):
        if high >= most:
            return None
        low, high = high + 1, min(2 * high, most)
    return low + bisect.bisect_left(range(low, high), True, key=enough)
