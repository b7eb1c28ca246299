"""How much slower is a candidate than its baseline: the trimmed mean of paired log-ratios, and what so many pairs can tell.

A ratio is candidate / baseline, one number for each pair of processes: above 1 is slower. Two processes of one pair that
run the same program are exchangeable, so the logarithm of their ratio lies symmetrically around 0 whatever disturbs the
machine, and around log r where the candidate takes r times as long. What disturbs a shared machine has heavy tails, under
which the trimmed t-test holds its level and loses least. One-sided 5 % over looks at 6, 10, 15 and 20 pairs; false alarms,
and slow-downs of one standard deviation of undisturbed pairs that are found, in % of 20,000 simulations
(tests/gate/test_slowdown.py repeats the trimmed one):

| Log-ratios | t | trimmed t | signed rank |
|---|---:|---:|---:|
| normal | 4.9, 100 | 5.1, 99 | 4.6, 99 |
| Student's t, 3 df | 4.4, 86 | 4.7, 93 | 4.6, 92 |
| 1 pair in 20 is 10 x as wide | 3.7, 81 | 5.2, 97 | 4.8, 96 |
| 1 pair in 10 is 10 x as wide | 3.0, 65 | 4.4, 94 | 4.6, 91 |
| 1 in 20 hit on one side | 2.8, 70 | 4.9, 97 | 4.6, 96 |

The signed-rank test cannot reject at a level below 2^-n: a gate of 20 trials would need 9 pairs to say anything at all.
Trimming a fifth from each end instead of a tenth costs 3 to 6 points of power under normal noise.

Pairs that resemble the ones before carry less than they seem to: `Likeness` says how much alike they may be, `widening` what
that costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import nctdtrinc, ndtri, stdtr, stdtrit

from te_bench.reports.convergence.power import POWER, fewest

Array = NDArray[np.float64]

TRIMMED = 0.1  # of the pairs at each end, one pair at least
FEWEST_TRIMMED = 6  # pairs: of 5 there would remain 2 degrees of freedom, which tell less than the mean of 4
SAME = 1e-12  # a standard error of log-ratios below this is rounding
SURE = 1.645  # standard errors from the autocorrelation to its upper bound: 95 %, one-sided
MOST_ALIKE = 0.95  # autocorrelation beyond which none is assumed: the mean of few pairs would tell nothing at all
FEWEST_ALIKE = 3  # pairs without which none is known to resemble another
MOST_PAIRS = 100_000  # beyond this no number of pairs is said to do


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The trimmed mean of n log-ratios; t = (log_ratio - x) / se has df degrees of freedom where x is the true one."""

    n: int
    log_ratio: float
    se: float  # widened; 0: the log-ratios do not vary
    df: int
    alike: float = 0.0  # the autocorrelation from one pair to the next that se allows for

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)

    @property
    def sd(self) -> float:
        """Of the log-ratio of one pair, as far as it matters to the mean: se sqrt(n), without the widening."""
        return self.se * math.sqrt(self.n) / self.widened

    @property
    def widened(self) -> float:
        return widening(self.n, self.alike)

    def p_above(self, x: float) -> float:
        """One-sided p-value of log ratio > x. Log-ratios without spread show nothing."""
        return float(stdtr(self.df, (x - self.log_ratio) / self.se)) if self.se else 1.0

    def p_below(self, x: float) -> float:
        """One-sided p-value of log ratio < x; not even ratios of exactly 1 show it: they are the same records twice."""
        return float(stdtr(self.df, (self.log_ratio - x) / self.se)) if self.se else 1.0

    def bound(self, level: float) -> float:
        """How far above (or below) log_ratio the one-sided confidence bound of 1 - level lies."""
        return -float(stdtrit(self.df, level)) * self.se


def trimmed(n: int) -> int:
    """How many of n sorted log-ratios are left out at each end."""
    return 0 if n < FEWEST_TRIMMED else max(1, math.floor(TRIMMED * n + 0.5))


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeness:
    """The autocorrelation from one log-ratio to the next, as so many pairs have it."""

    estimate: float
    pairs: int

    @property
    def off(self) -> float:
        """How far off the estimate may be."""
        return SURE / math.sqrt(self.pairs) if self.pairs else math.inf

    def bound(self, own: "Likeness") -> float:
        """The upper bound for one series of the gate: at least its own likeness where that is shown to be larger."""
        least = own.estimate if own.estimate - own.off > self.estimate else 0.0
        return min(max(self.estimate + self.off, least, 0.0), MOST_ALIKE)


def likeness(series: Sequence[Sequence[float]], *, trim: bool = True) -> Likeness:
    """The mean autocorrelation of series of log-ratios that share a machine, weighted by their pairs; of 3 pairs or more.

    Of n log-ratios with autocorrelation r the estimate is about r - (1 + 4 r) / n (Marriott & Pope 1954, Biometrika 41:390),
    which is solved for r; of few pairs a third of the correction is left out, for it would magnify the noise.
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
    """By what the standard error of a mean grows where neighbours among n log-ratios are alike, 0 <= alike < 1.

    In a first-order autoregression the mean's variance is v = 1 + 2 sum (1 - k/n) alike^k times as large, k from 1 to n - 1,
    and the sample's is 1 - (v - 1) / (n - 1) of what it was (Anderson 1971, The Statistical Analysis of Time Series, 8.2):
    the square root of the quotient.
    """
    more = 2 * alike / (1 - alike) * (1 - (1 - alike**n) / (n * (1 - alike)))  # the sum, twice
    return math.sqrt((1 + more) / (1 - more / (n - 1)))


def _winsorized(values: Array, g: int) -> Array:
    ordered = np.sort(values)
    return np.clip(values, ordered[g], ordered[values.size - g - 1])


def estimate(log_ratios: Sequence[float], *, trim: bool = True, alike: float = 0.0) -> Estimate:
    """Trimmed mean m and its standard error f sqrt(SSD_w / (h (h - 1))), SSD_w the winsorized sum of squares, h = n - 2 g.

    g is `trimmed(n)`, 0 without `trim`; f is the `widening` for pairs that are `alike`. Where they are,
    (m - true) / se follows Student's t with h - 1 degrees of freedom nearly (Tukey & McLaughlin 1963, Sankhya A 25:331). Of
    2 to 5 log-ratios it is the mean and the t-test.
    """
    values = np.asarray(log_ratios, dtype=np.float64)
    n, g = values.size, trimmed(values.size) if trim else 0
    h = n - 2 * g
    winsorized = _winsorized(values, g)
    se = math.sqrt(float(np.sum((winsorized - winsorized.mean()) ** 2)) / (h * (h - 1)))
    mean = float(np.sort(values)[g : n - g].mean())
    return Estimate(n=n, log_ratio=mean, se=se * widening(n, alike) if se > SAME else 0.0, df=h - 1, alike=alike)


def detectable(sd: float, n: int, *, alpha: float, alike: float = 0.0) -> float | None:
    """The smallest difference of log-ratios from a bound that n pairs tell from it with POWER; None below 2 pairs.

    By the noncentral t distribution: one-sided level alpha, sd and alike as in `Estimate`.
    """
    if n < 2:
        return None
    df = n - 2 * trimmed(n) - 1
    away = float(nctdtrinc(df, 1 - POWER, -float(stdtrit(df, alpha))))
    return away * widening(n, alike) * sd / math.sqrt(n)


def plan_pairs(sd: float, mde: float, *, alpha: float, alike: float = 0.0) -> int | None:
    """The fewest pairs that tell a log-ratio `mde` from its bound with POWER at one-sided level alpha.

    sd, alike: of the log-ratio of one pair, as in `Estimate`, from a pilot. None: more than MOST_PAIRS.
    """

    def enough(n: int) -> bool:
        return (detectable(sd, n, alpha=alpha, alike=alike) or math.inf) <= mde

    # as many as a known variance would need is too few, and by little
    least = max(2, math.floor(min(float(MOST_PAIRS), ((ndtri(1 - alpha) + ndtri(POWER)) * sd / mde) ** 2)))
    return fewest(enough, least, MOST_PAIRS)
