"""Find where a series of times changed its level, and by how much: optimal partitioning, from the library ruptures.

The logarithms of the series are cut into segments of constant level. The cuts minimise the squared deviations, in units
of the noise, plus a penalty for every change. PELT solves that problem (Killick, Fearnhead and Eckley, JASA 2012), but
with segments of at least two values the PELT of ruptures 1.1.10 prunes too much (7 of 400 random series cost more than
the optimum, 2026-11-21). So its exact dynamic programme is used, as in Jackson et al., IEEE Signal Processing Letters
2005: a tenth of a second for 1000 values.

Noise: by the median step between neighbours, which a few changes of level do not affect. Values further than twice the
noise from the median of the five around them are moved to that distance (Hampel's identifier): one bad run is no change.
Penalty: at most alpha of series of pure Gaussian noise, of equal length and treated alike, save more by one change.
Half of alpha is kept for several changes at once, which that simulation leaves out.

Rates at alpha 0.01 in %, by 1000 series each; a step of 5 % in noise of 1 % counts as found within one place.
tests/reports/history/test_change_points.py measures them again.
    values                                   6    10    20    50   100   200
    false alarms, Gaussian noise           0.2   0.7   0.3   0.4   0.7   0.3
    false alarms, Student's t, 4 df        0.4   0.3   0.7   1.0   1.6   1.3
    false alarms, Laplace noise            0.5   0.7   0.8   1.3   2.1   2.0
    false alarms, one value of 130 %       0.3   0.8   0.5   0.6   0.7   1.0
    step found, in the middle               25    61   100   100   100   100
    step found, 3 values old                23    50    90   100   100   100
    step found, 2 values old                19    40    73    95    99    99

In 99 % or more of the found steps, the interval of the place held the true place. The interval of the size held 1.05 in
93 to 95 % from 20 values on (90 % for 10, 80 % for 6, where only steps that look large are found).
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Values = NDArray[np.float64]

SHORTEST = 6  # values at least, to search for a change
SMALLEST = 2  # values in a segment at least: one run is no level
ALPHA = 0.01  # the false-alarm rate of one series
CONFIDENCE = 0.95
FLOOR = 1e-3  # smallest relative noise: nobody cares about a tenth of a percent
_GAUSSIAN = 0.9538725524  # median |x - y| of two standard normal values: sqrt(2) times the normal's upper quartile
#: Hampel's identifier. With a reach of 3, one bad run at an end of 40 counted as a change in 7 % of series; with 2 in 3 %.
_WINDOW, _REACH = 5, 2.0
_SIMULATED = 20_000  # series of noise, fewer if long; the seed is fixed, so that the same records give the same page
_AT_ONCE = 1_000_000  # values of noise in memory: 40 MB in the windows of drawn_in
#: Largest excess of -2 log likelihood at the true place of a change, 95 %: -2 log(1 - sqrt(0.95)). Source: Hansen,
#: "Sample splitting and threshold estimation", Econometrica 68 (2000), 575-603.
_PLACE = -2 * math.log(1 - math.sqrt(CONFIDENCE))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangePoint:
    """A change of level before value `index`; with 95 % confidence it lies before one of the values `first` to `last`.

    ratio: level after over level before, by geometric means. low, high: its 95 % t-interval, if the place is right.
    """

    index: int
    first: int
    last: int
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Segmentation:
    """A series cut where its level changed; `noise` is relative.

    levels: the segments' geometric means; in a searched series, of values after Hampel's identifier.
    """

    changes: tuple[ChangePoint, ...]
    bounds: tuple[int, ...]  # 0, the changes, the length
    levels: tuple[float, ...]
    noise: float | None  # None if the series is too short to search


def segment(values: Sequence[float], *, alpha: float = ALPHA) -> Segmentation:
    """Return a series of positive numbers, such as seconds, cut where its level changed; alpha: the false-alarm rate.

    Series of fewer than 6 values are not searched. Raises ValueError for an alpha outside [0.0001, 0.5], for which no
    penalty was simulated.
    """
    if not 1e-4 <= alpha <= 0.5:
        raise ValueError(f"--alpha {alpha:g}: give a false-alarm rate between 0.0001 and 0.5, such as {ALPHA}")
    n = len(values)
    logs = np.log(np.asarray(values, dtype=np.float64))
    if n < SHORTEST:
        return Segmentation(changes=(), bounds=(0, n), levels=_levels(logs, (0, n)) if n else (), noise=None)
    noise = max(float(noise_of(logs)), FLOOR)
    logs = drawn_in(logs, np.asarray(noise))
    bounds = cheapest_cuts((logs - logs.mean()) / noise, penalty(n, alpha))
    changes = tuple(_change(logs, noise, bounds[place - 1 : place + 2]) for place in range(1, len(bounds) - 1))
    return Segmentation(changes=changes, bounds=bounds, levels=_levels(logs, bounds), noise=noise)


def _levels(logs: Values, bounds: Sequence[int]) -> tuple[float, ...]:
    return tuple(float(np.exp(logs[start:end].mean())) for start, end in itertools.pairwise(bounds))


@functools.cache
def penalty(n: int, alpha: float) -> float:
    """Return what a change must save in squared deviations over squared noise: simulated noise's 1 - alpha / 2 quantile."""
    random, left, found = np.random.default_rng(0), min(_SIMULATED, 4 * _AT_ONCE // n), []
    while left > 0:
        noise = random.standard_normal((min(left, max(_AT_ONCE // n, 1)), n))
        left -= len(noise)
        deviation = noise_of(noise)
        found.append(_saved_by_one(drawn_in(noise, deviation)) / deviation**2)
    return float(np.quantile(np.concatenate(found), 1 - alpha / 2))


def noise_of(logs: Values) -> Values:
    """Return the standard deviation of Gaussian noise with the same median step between neighbours; over the last axis."""
    apart: Values = np.median(np.abs(np.diff(logs, axis=-1)), axis=-1) / _GAUSSIAN
    return apart


def drawn_in(logs: Values, noise: Values) -> Values:
    """Return values clipped to twice the noise around the median of the five values around them; ends are mirrored."""
    around = [(0, 0)] * (logs.ndim - 1) + [(_WINDOW // 2, _WINDOW // 2)]
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(logs, around, mode="reflect"), _WINDOW, axis=-1)
    middle, reach = np.median(windows, axis=-1), _REACH * noise[..., None]
    clipped: Values = np.clip(logs, middle - reach, middle + reach)
    return clipped


def _saved_by_one(values: Values) -> Values:
    """Return the most that one change of level, at any place, saves in squared deviations; over the last axis."""
    n = values.shape[-1]
    centred = values - values.mean(axis=-1, keepdims=True)
    before = np.arange(SMALLEST, n - SMALLEST + 1)
    sums = np.cumsum(centred, axis=-1)[..., SMALLEST - 1 : n - SMALLEST]
    most: Values = (sums**2 * (n / (before * (n - before)))).max(axis=-1)
    return most


def cheapest_cuts(scaled: Values, price: float) -> tuple[int, ...]:
    """Return 0, the places of the cheapest changes, and the length: exact, over every number of changes."""
    from ruptures import KernelCPD  # here, because the import takes 0.7 s

    n = len(scaled)
    most = n // SMALLEST - 1
    search = KernelCPD(kernel="linear", min_size=SMALLEST).fit(scaled.reshape(-1, 1))
    search.predict(n_bkps=most)  # also finds the cheapest segmentation of each smaller number
    sums = np.concatenate([[0.0], np.cumsum(scaled)])
    best: tuple[int, ...] = (0, n)
    cheapest = -float(sums[-1] ** 2) / n
    for number in range(1, most + 1):
        bounds = (0, *(int(end) for end in search.segmentations_dict[number]))
        ends = np.asarray(bounds)
        cost = number * price - float(np.sum(np.diff(sums[ends]) ** 2 / np.diff(ends)))
        if cost < cheapest:
            best, cheapest = bounds, cost
    return best


def _change(logs: Values, noise: float, bounds: Sequence[int]) -> ChangePoint:
    """Return the change between the two segments of `bounds`, with intervals of its place and size."""
    start, at, end = bounds
    before, after = logs[start:at], logs[at:end]
    degrees = len(before) + len(after) - 2
    squares = float(((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum())
    error = math.sqrt(max(squares / degrees, FLOOR**2) * (1 / len(before) + 1 / len(after)))
    half = float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * error
    shift = float(after.mean() - before.mean())
    first, last = _where(logs[start:end] / noise, at - start)
    return ChangePoint(
        index=at,
        first=start + first,
        last=start + last,
        ratio=math.exp(shift),
        low=math.exp(shift - half),
        high=math.exp(shift + half),
    )


def _where(values: Values, at: int) -> tuple[int, int]:
    """Return the first and last place of one change in `values` that the likelihood does not rule out."""
    n = len(values)
    before = np.arange(1, n)
    saved = np.cumsum(values - values.mean())[:-1] ** 2 * (n / (before * (n - before)))
    likely = before[saved >= saved[at - 1] - _PLACE]
    return int(likely.min()), int(likely.max())
