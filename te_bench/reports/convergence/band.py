"""Compute a band that holds the whole difference curve at once, over the last quarter of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from te_bench.reports.analysis.measures import CONFIDENCE
from te_bench.reports.convergence.skewed import mean_of

Array = NDArray[np.float64]

LAST = 0.25  # the share of training that counts: earlier, the high learning rate hides the cost of the precision
FEWEST_SEEDS = 3
FEWEST_FLIPPED = 5  # 4 runs have only 7 distinct sign patterns: too few for a 95 % quantile
PATTERNS = 4096  # all patterns up to 12 seeds; this many random ones beyond


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The limits by step between which the mean of candidate - control lies at all steps at once."""

    step: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def band(
    steps: Sequence[float], candidate: Sequence[Sequence[float]], control: Sequence[Sequence[float]]
) -> Band | None:
    """Return the verdict's 95 % interval at each step of the last quarter, c / c_1 times as long; None below 3 pairs.

    steps rise. candidate and control: (n, steps) losses; row i of both has the same seed. c is the 95 % quantile of max |t|
    over the steps and c_1 that of one |t|, Student's. c comes from flipping the signs of whole centred difference curves
    and studentising each t anew, which keeps the correlation of neighbouring steps. It is at most Bonferroni's, which alone
    serves 3 and 4 pairs, and at least c_1. So the band holds the verdict's interval, which need not be symmetric.
    """
    if len(candidate) < FEWEST_SEEDS:
        return None
    at = np.asarray(steps, dtype=np.float64)
    late = at >= at[-1] - LAST * (at[-1] - min(at[0], 0.0))
    gaps = (np.asarray(candidate, dtype=np.float64) - np.asarray(control, dtype=np.float64))[:, late]
    mean, one = gaps.mean(axis=0), float(stdtrit(len(gaps) - 1, 1 - (1 - CONFIDENCE) / 2))
    low, high = np.transpose([_interval(of_step) for of_step in gaps.T])
    longer = max(1.0, _critical(gaps - mean) / one)
    low, high = mean - longer * (mean - low), mean + longer * (high - mean)
    return Band(step=tuple(at[late].tolist()), low=tuple(low.tolist()), high=tuple(high.tolist()))


def _interval(gaps: Array) -> tuple[float, float]:
    """Return the verdict's interval of a mean gap, or the gap alone where it does not vary."""
    return mean_of(gaps).interval((1 - CONFIDENCE) / 2) if np.ptp(gaps) > 0 else (gaps[0], gaps[0])


def _critical(residuals: Array) -> float:
    """Return the 95 % quantile of max |t| over steps, under sign flips of whole curves; at most Bonferroni's."""
    n, steps = residuals.shape
    bonferroni = float(stdtrit(n - 1, 1 - (1 - CONFIDENCE) / (2 * steps)))
    varies = residuals[:, np.ptp(residuals, axis=0) > 0]
    if n < FEWEST_FLIPPED or not varies.size:
        return bonferroni
    means = _signs(n) @ varies / n
    # Flipping signs keeps the squares, so the variance follows from the mean.
    variances = np.maximum((varies**2).sum(axis=0) - n * means**2, 0) / (n - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(variances > 0, np.abs(means) / np.sqrt(variances / n), np.inf)
    return min(bonferroni, float(np.quantile(t.max(axis=1), CONFIDENCE, method="higher")))


def _signs(n: int) -> Array:
    """Return (patterns, n) of +-1. The first column is +, because a pattern and its opposite have the same |t|."""
    if 2 ** (n - 1) <= PATTERNS // 2:
        return np.array([(1, *rest) for rest in product((1.0, -1.0), repeat=n - 1)])
    return np.random.default_rng(0).choice(np.array([1.0, -1.0]), (PATTERNS, n))  # seeded: equal curves, equal bands
