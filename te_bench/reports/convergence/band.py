"""A band that holds the whole difference curve at once, over the last quarter of training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]

LAST = 0.25  # the share of training that counts: before, the learning rate still hides what the precision costs
FEWEST_SEEDS = 3
FEWEST_FLIPPED = 5  # 4 runs have 7 sign patterns that tell them apart: too few for a 95 % quantile
PATTERNS = 4096  # every pattern up to 12 seeds, as many drawn ones beyond


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Mean of candidate - control by step over n pairs, and what holds it everywhere with `confidence`."""

    n: int
    confidence: float
    critical: float  # standard errors to either side
    step: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def band(
    steps: Sequence[float],
    candidate: Sequence[Sequence[float]],
    control: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
) -> Band | None:
    """mean +- c sd / sqrt(n) over the steps of the last quarter, c the quantile of max |t|; None below 3 pairs.

    candidate and control: (n, steps) losses, row i of both with the same seed. c comes from flipping the signs of whole
    centred difference curves, each t studentised anew, so neighbouring steps stay as correlated as they are; never more
    than Bonferroni's, which alone serves 3 and 4 pairs.

    Raises ValueError for curves of another shape than (n, steps), values that are not finite, steps that do not
    rise, and a confidence outside (0, 1).
    """
    at = np.asarray(steps, dtype=np.float64)
    arms = [curves_of(losses, at, arm) for losses, arm in ((candidate, "candidate"), (control, "control"))]
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence}: give a number between 0 and 1, such as 0.95")
    if arms[0].shape != arms[1].shape:
        raise ValueError(
            f"{len(arms[0])} candidate and {len(arms[1])} control curves cannot be paired: give the same seeds"
        )
    if len(arms[0]) < FEWEST_SEEDS:
        return None
    late = at >= at[-1] - LAST * (at[-1] - min(at[0], 0.0))
    gaps = (arms[0] - arms[1])[:, late]
    mean, n = gaps.mean(axis=0), len(gaps)
    se = gaps.std(axis=0, ddof=1) / math.sqrt(n)
    critical = _critical(gaps - mean, confidence)
    return Band(
        n=n,
        confidence=confidence,
        critical=critical,
        step=tuple(at[late].tolist()),
        mean=tuple(mean.tolist()),
        low=tuple((mean - critical * se).tolist()),
        high=tuple((mean + critical * se).tolist()),
    )


def _critical(residuals: Array, confidence: float) -> float:
    """The confidence quantile of max |t| over steps, under sign flips of whole curves; at most Bonferroni's."""
    n, steps = residuals.shape
    bonferroni = float(stdtrit(n - 1, 1 - (1 - confidence) / (2 * steps)))
    varies = residuals[:, np.ptp(residuals, axis=0) > 0]
    if n < FEWEST_FLIPPED or not varies.size:
        return bonferroni
    means = _signs(n) @ varies / n
    # flipping signs keeps the squares, so the variance follows from the mean
    variances = np.maximum((varies**2).sum(axis=0) - n * means**2, 0) / (n - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(variances > 0, np.abs(means) / np.sqrt(variances / n), np.inf)
    return min(bonferroni, float(np.quantile(t.max(axis=1), confidence, method="higher")))


def _signs(n: int) -> Array:
    """(patterns, n) of +-1. The first is + throughout: a pattern and its opposite have the same |t|."""
    if 2 ** (n - 1) <= PATTERNS // 2:
        return np.array([(1, *rest) for rest in product((1.0, -1.0), repeat=n - 1)])
    return np.random.default_rng(0).choice(np.array([1.0, -1.0]), (PATTERNS, n))  # the same curves give the same band


def curves_of(losses: Sequence[Sequence[float]], steps: Array, arm: str) -> Array:
    """(n, steps) losses of an arm's runs. Raises ValueError for another shape, and what is not finite or not in order."""
    if not steps.size or np.any(np.diff(steps) <= 0):
        raise ValueError(f"steps {steps.tolist()[:5]}: give the steps in order, each once")
    for run, curve in enumerate(losses, start=1):
        if len(curve) != steps.size:
            raise ValueError(f"{arm}, run {run}: {len(curve)} losses at {steps.size} steps; give one for each step")
    values = np.asarray(losses, dtype=np.float64).reshape(len(losses), steps.size)
    for run, place in np.argwhere(~np.isfinite(values)):
        raise ValueError(f"{arm}, run {run + 1}: the loss is {values[run, place]} at step {steps[place]:g}")
    return values
