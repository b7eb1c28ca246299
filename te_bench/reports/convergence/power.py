"""What an equivalence test of n seeds can show: its power for normal gaps, and the margins and seeds that have enough.

The test is that of `skewed`. Its power is counted in simulated gaps; where it is searched for, a `typical_reach` stands for
one that varies with the gaps' skewness, which is right at a power of 80 % and a true gap of 0. sd is always that of the gap
(candidate - control): of the pairs' differences, or, unpaired, sqrt(sd_a^2 + sd_b^2) of one run an arm. Losses, gaps,
margins and standard deviations share one unit, nat as a rule.
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

POWER = 0.8  # the field's habit (Cohen 1988, Statistical Power Analysis, 2.4): four claims in five succeed
CAUTION = 0.8  # the confidence that a spread is no larger than what is planned for
MOST_SEEDS = 1_000_000  # beyond this no number of seeds is said to do

DRAWS = 20_000  # a power of 80 % is known within 0.6 points

_ORDER = 128  # agrees with adaptive quadrature to 1e-11, from 1 degree of freedom to 1000
_TAIL = 1e-12  # of the chi distribution, left out at either end


@functools.cache
def legendre(order: int) -> tuple[Array, Array]:
    """(nodes, weights) of Gauss-Legendre quadrature over [-1, 1], worked out once: of 400 it takes seconds on a busy CPU."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    return nodes, weights


def gap_sd(sd: float, correlation: float = 0.0) -> float:
    """sd sqrt(2 (1 - rho)): the standard deviation of candidate - control where each arm's runs vary by sd."""
    return sd * math.sqrt(2 * (1 - correlation))


def at_most(sd: float, df: float) -> float:
    """The upper CAUTION bound of a standard deviation that was estimated with df degrees of freedom."""
    return sd * math.sqrt(df / float(chdtri(df, CAUTION)))


def tost_power(margin: float, *, se: float, df: float, gap: float = 0.0, alpha: float = 0.05) -> float:
    """Probability of EQUIVALENT where the estimate is N(gap, se^2) and its error known from df degrees of freedom."""
    if int(df) + 1 < skewed.FEWEST:
        return 0.0
    below, above = _shown(min(int(df) + 1, skewed.MOST), alpha)
    return float(np.mean(np.maximum(below + gap / se, above - gap / se) <= margin / se))


@functools.lru_cache(maxsize=64)
def _shown(n: int, alpha: float) -> tuple[Array, Array]:
    """Of simulated normal gaps of mean 0: the least bounds, in standard errors, that they are shown to lie within."""
    return skewed.shown(n, skewed.critical(n - 1, alpha), DRAWS)


def exact_power(margin: float, *, reach: float, df: float, gap: float = 0.0) -> float:
    """Probability that |estimate| + reach se < margin, the estimate N(gap, 1), se^2 chi^2_df / df; all in standard errors.

    The integral over the chi distribution of se of the normal probability of an estimate between the two bounds: with
    Student's t for the reach what Owen's Q computes (Phillips 1990, J. Pharmacokinet. Biopharm. 18:137).
    """
    low = math.sqrt(chdtri(df, 1 - _TAIL) / df)
    high = min(math.sqrt(chdtri(df, _TAIL) / df), margin / reach)  # beyond it no estimate is called equivalent
    if high <= low:
        return 0.0
    nodes, weights = legendre(_ORDER)
    x = low + (high - low) * (nodes + 1) / 2  # se
    log_density = math.log(2) + df / 2 * math.log(df / 2) - gammaln(df / 2) + (df - 1) * np.log(x) - df * x**2 / 2
    inside = ndtr(margin - reach * x - gap) - ndtr(-margin + reach * x - gap)
    return float(np.sum(weights * np.exp(log_density) * inside) * (high - low) / 2)


def power(n: int, sd: float, margin: float, *, gap: float = 0.0, alpha: float = 0.05, paired: bool = True) -> float:
    """Probability of EQUIVALENT with n pairs, or n runs an arm, at a true `gap`: n - 1 or 2 n - 2 degrees of freedom."""
    return tost_power(margin, se=sd / math.sqrt(n), df=_freedom(n, paired), gap=gap, alpha=alpha)


def detectable(*, se: float, df: float, alpha: float = 0.05) -> float | None:
    """The smallest margin that a true gap of 0 is shown to lie within with a probability of POWER; None of 2 gaps."""
    if int(df) + 1 < skewed.FEWEST:
        return None
    return se * _detectable(df, alpha)


@functools.lru_cache(1024)  # with equal numbers of seeds there are few
def _detectable(df: float, alpha: float) -> float:
    """In standard errors."""
    reach = skewed.typical_reach(df, alpha)
    if math.isinf(reach):
        return math.inf
    furthest = reach * math.sqrt(chdtri(df, (1 - POWER) / 2) / df) + 10
    return _root(lambda margin: exact_power(margin, reach=reach, df=df) - POWER, 0, furthest)


def reach_of(margin: float, df: float) -> float:
    """The reach with which `margin`, in standard errors, is detectable."""
    return _root(lambda reach: exact_power(margin, reach=reach, df=df) - POWER, 1e-9, 2 * margin)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq  # a quarter of a second to import, which a report without a verdict spares

    return float(brentq(function, low, high))


def seeds_needed(sd: float, margin: float, *, gap: float = 0.0, alpha: float = 0.05, paired: bool = True) -> int | None:
    """The fewest pairs (runs an arm) with a power of POWER at a true `gap`; None when no number would do."""
    if abs(gap) >= margin:
        return None

    def typical(n: int) -> float:
        df, se = _freedom(n, paired), sd / math.sqrt(n)
        if df + 1 < skewed.FEWEST:
            return 0.0
        return exact_power(margin / se, reach=skewed.typical_reach(df, alpha), df=df, gap=gap / se)

    return fewest(lambda n: typical(n) >= POWER, 2, MOST_SEEDS)


def seeds_beyond(sd: float, excess: float, *, alpha: float = 0.05, paired: bool = True) -> int | None:
    """The fewest pairs (runs an arm) whose one-sided test sees a true `excess` over a bound with a power of POWER."""
    if excess <= 0:
        return None

    def seen(n: int) -> float:
        df = _freedom(n, paired)
        if df + 1 < skewed.FEWEST:
            return 0.0
        return 1 - float(nctdtr(df, excess * math.sqrt(n) / sd, skewed.typical_reach(df, alpha)))

    return fewest(lambda n: seen(n) >= POWER, 2, MOST_SEEDS)


def two_figures(value: float, rounded: Callable[[float], int]) -> str:
    """Of a value above 0: math.ceil for what is enough, so that it is when given again, math.floor for what is at most."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{rounded(round(value / unit, 6)) * unit:.2g}"


def _freedom(n: int, paired: bool) -> int:
    return n - 1 if paired else 2 * n - 2


def fewest(enough: Callable[[int], bool], least: int, most: int) -> int | None:
    """The least number from `least` on that is enough, as every larger one is then; None where `most` is not."""
    low = high = least
    while not enough(high):
        if high >= most:
            return None
        low, high = high + 1, min(2 * high, most)
    return low + bisect.bisect_left(range(low, high), True, key=enough)
