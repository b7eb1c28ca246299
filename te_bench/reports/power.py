"""What an equivalence test of n seeds can show: the exact power of two one-sided t-tests, and its inverses.

sd is always that of the gap (candidate - control): of the pairs' differences, or, unpaired, sqrt(sd_a^2 + sd_b^2) of one
run an arm. Losses, gaps, margins and standard deviations share one unit, nat as a rule.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtri, gammaln, nctdtr, ndtr, stdtrit

POWER = 0.8  # the field's habit (Cohen 1988, Statistical Power Analysis, 2.4): four claims in five succeed
MOST_SEEDS = 1_000_000  # beyond this no number of seeds is said to do

# Order 128 agrees with adaptive quadrature to 1e-11, from 1 degree of freedom to 1000.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(128)
_TAIL = 1e-12  # of the chi distribution, left out at either end


def gap_sd(sd: float, correlation: float = 0.0) -> float:
    """sd sqrt(2 (1 - rho)): the standard deviation of candidate - control where each arm's runs vary by sd."""
    return sd * math.sqrt(2 * (1 - correlation))


def exact_power(margin: float, *, se: float, df: float, gap: float = 0.0, alpha: float = 0.05) -> float:
    """Probability that |estimate| + t se_hat < margin, the estimate N(gap, se^2), se_hat^2 se^2 chi^2_df / df.

    The integral over the chi distribution of se_hat of the normal probability of an estimate between the two bounds,
    t the 1 - alpha quantile of Student's t with df degrees of freedom: what Owen's Q computes (Phillips 1990,
    J. Pharmacokinet. Biopharm. 18:137), where the normal or the non-central-t approximation is off at few seeds.
    """
    reach = float(stdtrit(df, 1 - alpha)) * se
    low = math.sqrt(chdtri(df, 1 - _TAIL) / df)
    high = min(math.sqrt(chdtri(df, _TAIL) / df), margin / reach)  # beyond it no estimate is called equivalent
    if high <= low:
        return 0.0
    x = low + (high - low) * (_NODES + 1) / 2  # se_hat / se
    log_density = math.log(2) + df / 2 * math.log(df / 2) - gammaln(df / 2) + (df - 1) * np.log(x) - df * x**2 / 2
    inside = ndtr((margin - reach * x - gap) / se) - ndtr((-margin + reach * x - gap) / se)
    return float(np.sum(_WEIGHTS * np.exp(log_density) * inside) * (high - low) / 2)


def power(n: int, sd: float, margin: float, *, gap: float = 0.0, alpha: float = 0.05, paired: bool = True) -> float:
    """Probability of EQUIVALENT with n pairs, or n runs an arm, at a true `gap`: n - 1 or 2 n - 2 degrees of freedom."""
    return exact_power(margin, se=sd / math.sqrt(n), df=n - 1 if paired else 2 * n - 2, gap=gap, alpha=alpha)


def detectable(*, se: float, df: float, alpha: float = 0.05) -> float:
    """The smallest margin that a true gap of 0 would be shown to lie within with a probability of POWER."""
    return se * _detectable(df, alpha)


@functools.lru_cache(1024)  # with equal numbers of seeds there are few
def _detectable(df: float, alpha: float) -> float:
    """In standard errors."""
    furthest = float(stdtrit(df, 1 - alpha)) * math.sqrt(chdtri(df, (1 - POWER) / 2) / df) + 10
    return float(brentq(lambda margin: exact_power(margin, se=1, df=df, alpha=alpha) - POWER, 0, furthest))


def seeds_needed(sd: float, margin: float, *, gap: float = 0.0, alpha: float = 0.05, paired: bool = True) -> int | None:
    """The fewest pairs (runs an arm) with a power of POWER at a true `gap`; None when no number would do."""
    if abs(gap) >= margin:
        return None
    return _fewest(lambda n: power(n, sd, margin, gap=gap, alpha=alpha, paired=paired))


def seeds_beyond(sd: float, excess: float, *, alpha: float = 0.05, paired: bool = True) -> int | None:
    """The fewest pairs (runs an arm) whose one-sided t-test sees a true `excess` over a bound with a power of POWER."""
    if excess <= 0:
        return None

    def seen(n: int) -> float:
        df = n - 1 if paired else 2 * n - 2
        return 1 - float(nctdtr(df, excess * math.sqrt(n) / sd, stdtrit(df, 1 - alpha)))

    return _fewest(seen)


def _fewest(power_of: Callable[[int], float]) -> int | None:
    few, many = 1, 2
    while power_of(many) < POWER:
        few, many = many, 2 * many
        if many > MOST_SEEDS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        if power_of(middle) < POWER:
            few = middle
        else:
            many = middle
    return many
