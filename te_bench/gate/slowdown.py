"""Estimate how much slower a candidate is than its baseline: the trimmed mean of paired log-ratios, and its test's power.

A ratio is candidate / baseline, one number per pair of processes; above 1 is slower. If both processes of a pair run the
same program, they are exchangeable, so the logarithm of their ratio is symmetric around 0 whatever disturbs the machine; if
the candidate takes r times as long, it is symmetric around log r. Disturbances of a shared machine have heavy tails. Under
them the trimmed t-test holds its level and loses least power. The table shows false alarms, and found slow-downs of one
standard deviation of undisturbed pairs, in % of 20,000 simulations: one-sided 5 % over looks at 6, 10, 15 and 20 pairs
(tests/gate/test_slowdown.py repeats the trimmed ones).

| Log-ratios | t | trimmed t | signed rank |
|---|---:|---:|---:|
| normal | 4.9, 100 | 5.1, 99 | 4.6, 99 |
| Student's t, 3 df | 4.4, 86 | 4.7, 93 | 4.6, 92 |
| 1 pair in 20 is 10 x as wide | 3.7, 81 | 5.2, 97 | 4.8, 96 |
| 1 pair in 10 is 10 x as wide | 3.0, 65 | 4.4, 94 | 4.6, 91 |
| 1 in 20 hit on one side | 2.8, 70 | 4.9, 97 | 4.6, 96 |

The signed-rank test cannot reject at a level below 2^-n: a gate of 20 trials would need 9 pairs for any claim.
Trimming a fifth from each end instead of a tenth costs 3 to 6 points of power under normal noise.

Correlated pairs carry less information than independent ones: `Likeness` bounds their autocorrelation, `widening` is its
cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import nctdtrinc, ndtri, stdtr, stdtrit

from te_bench.reports.convergence.power import POWER, fewest

Array = NDArray[np.float64]

TRIMMED = 0.1  # of the pairs at each end, at least one pair
FEWEST_TRIMMED = 6  # pairs; trimming 5 would leave 2 degrees of freedom, worse than the mean's 4
SAME = 1e-12  # a standard error of log-ratios below this is rounding
SURE = 1.645  # standard errors from the autocorrelation to its upper bound: 95 %, one-sided
MOST_ALIKE = 0.95  # the largest autocorrelation assumed; beyond it the mean of few pairs would tell nothing
FEWEST_ALIKE = 3  # pairs, the fewest with an autocorrelation
MOST_PAIRS = 100_000  # plan_pairs answers None beyond this


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The trimmed mean of n log-ratios; t = (log_ratio - x) / se has df degrees of freedom if the true log-ratio is x."""

    n: int
    log_ratio: float
    se: float  # widened; 0: the log-ratios do not vary
    df: int
    alike: float = 0.0  # autocorrelation between successive pairs that se allows for

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)

    @property
    def sd(self) -> float:
        """Standard deviation of one pair's log-ratio, as it affects the mean: se sqrt(n), without the widening."""
        return self.se * math.sqrt(self.n) / self.widened

    @property
    def widened(self) -> float:
        return widening(self.n, self.alike)

    def p_above(self, x: float) -> float:
        """Return the one-sided p-value of log ratio > x; 1 for log-ratios without spread."""
        return float(stdtr(self.df, (x - self.log_ratio) / self.se)) if self.se else 1.0

    def p_below(self, x: float) -> float:
        """Return the one-sided p-value of log ratio < x; 1 without spread, even for ratios of 1: one record twice."""
        return float(stdtr(self.df, (self.log_ratio - x) / self.se)) if self.se else 1.0

    def bound(self, level: float) -> float:
        """Return the distance from log_ratio to its one-sided confidence bound of 1 - level."""
        return -float(stdtrit(self.df, level)) * self.se


def trimmed(n: int) -> int:
    """Return how many of n sorted log-ratios are left out at each end."""
    return 0 if n < FEWEST_TRIMMED else max(1, math.floor(TRIMMED * n + 0.5))


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeness:
    """The autocorrelation between successive log-ratios, estimated from `pairs` pairs."""

    estimate: float
    pairs: int

    @property
    def off(self) -> float:
        """The possible error of the estimate."""
        return SURE / math.sqrt(self.pairs) if self.pairs else math.inf

    def bound(self, own: "Likeness") -> float:
        """Return the upper bound for one series: at least its own autocorrelation if that is shown to be larger."""
        least = own.estimate if own.estimate - own.off > self.estimate else 0.0
        return min(max(self.estimate + self.off, least, 0.0), MOST_ALIKE)


def likeness(series: Sequence[Sequence[float]], *, trim: bool = True) -> Likeness:
    """Return the mean autocorrelation of series of log-ratios on one machine, weighted by pairs; series below 3 are ignored.

    For n log-ratios with autocorrelation r, the estimate's mean is about r - (1 + 4 r) / n (Marriott & Pope 1954, Biometrika
    41:390), which is solved for r. The divisor is at least 1/3, so that few pairs do not magnify the noise.
    """
    known = [np.asarray(one, dtype=np.float64) for one in series if len(one) >= FEWEST_ALIKE]
    pairs, total = 0, 0.0
    for values in known:
        off = _winsorized(values, trimmed(values.size) if trim else 0)
        off = off - off.mean()
        squares = float(np.sum(off**2))
        if squares > SAME**2:
            n = values.size
            found = (float(np.sum(off[1:] * off[:-1])) / squares + 1 / n) / max(1 - 4 / n, 1 / 3)
            pairs, total = pairs + n, total + n * found
    return Likeness(estimate=total / pairs if pairs else 0.0, pairs=pairs)


def widening(n: int, alike: float) -> float:
    """Return the factor by which the standard error of a mean of n log-ratios grows with autocorrelation 0 <= alike < 1.

    In a first-order autoregression the mean's variance is v = 1 + 2 sum (1 - k/n) alike^k times as large, k from 1 to n - 1,
    and the sample's variance is 1 - (v - 1) / (n - 1) times as large (Anderson 1971, The Statistical Analysis of Time
    Series, 8.2). The factor is the square root of the quotient.
    """
    more = 2 * alike / (1 - alike) * (1 - (1 - alike**n) / (n * (1 - alike)))  # the sum, twice
    return math.sqrt((1 + more) / (1 - more / (n - 1)))


def _winsorized(values: Array, g: int) -> Array:
    ordered = np.sort(values)
    return np.clip(values, ordered[g], ordered[values.size - g - 1])


def estimate(log_ratios: Sequence[float], *, trim: bool = True, alike: float = 0.0) -> Estimate:
    """Return the trimmed mean m and its standard error f sqrt(SSD_w / (h (h - 1))).

    SSD_w is the winsorized sum of squares, h = n - 2 g; g is `trimmed(n)`, 0 without `trim`; f is the `widening` for the
    autocorrelation `alike`. (m - true) / se nearly follows Student's t with h - 1 degrees of freedom (Tukey & McLaughlin
    1963, Sankhya A 25:331). For 2 to 5 log-ratios this is the mean and the t-test.
    """
    values = np.asarray(log_ratios, dtype=np.float64)
    n, g = values.size, trimmed(values.size) if trim else 0
    h = n - 2 * g
    winsorized = _winsorized(values, g)
    se = math.sqrt(float(np.sum((winsorized - winsorized.mean()) ** 2)) / (h * (h - 1)))
    mean = float(np.sort(values)[g : n - g].mean())
    return Estimate(n=n, log_ratio=mean, se=se * widening(n, alike) if se > SAME else 0.0, df=h - 1, alike=alike)


def detectable(sd: float, n: int, *, alpha: float, alike: float = 0.0) -> float | None:
    """Return the smallest distance of a log-ratio from a bound that n pairs detect with POWER; None below 2 pairs.

    The test is one-sided at level alpha, by the noncentral t distribution; sd and alike are as in `Estimate`.
    """
    if n < 2:
        return None
    df = n - 2 * trimmed(n) - 1
    away = float(nctdtrinc(df, 1 - POWER, -float(stdtrit(df, alpha))))
    return away * widening(n, alike) * sd / math.sqrt(n)


def plan_pairs(sd: float, mde: float, *, alpha: float, alike: float = 0.0) -> int | None:
    """Return the fewest pairs that detect a distance `mde` of a log-ratio from its bound with POWER.

    The test is one-sided at level alpha. sd, alike: of the log-ratio of one pair, as in `Estimate`, from a pilot. None: more
    than MOST_PAIRS.
    """

    def enough(n: int) -> bool:
        return (detectable(sd, n, alpha=alpha, alike=alike) or math.inf) <= mde

    # start from the pairs that a known variance would need, which are slightly too few
    least = max(2, math.floor(min(float(MOST_PAIRS), ((ndtri(1 - alpha) + ndtri(POWER)) * sd / mde) ** 2)))
    return fewest(enough, least, MOST_PAIRS)
