"""Check whether a run stayed stable: non-finite losses, lasting rises, spikes, and confidence bounds of their rates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.special import betaincinv

Array = NDArray[np.float64]

# A rise counts if the median of this many logged losses has it; 8 spikes in a row do not count. In 6 real runs that median
# never rose by more than 0.03 over its minimum, while single losses rose by 0.11.
RISE_WINDOW = 17  # odd, because the median of an even number lies between two losses
RISE = 0.5  # nat
SURE = 2.0  # standard errors: what moves by fewer may be noise
SPIKE_WINDOW = 128  # logged points before the judged one, as in llm.c's outlier detector
FEWEST_BEFORE = 32  # the MAD of fewer points is off by more than 15 %
# In robust standard deviations. Of 29,232 training losses (nanoGPT's character model on an H200, 3 runs in BF16 and 3 in
# FP8, every step) none was above 3.4. Of 400,000 simulated values, above 7 were: normal 0; log-normal with sigma 0.3, as
# skewed as gradient norms, 1 in 7,000; Student's t with 5 degrees of freedom 1 in 2,600. Compare with the control's spikes.
SPIKE = 7.0
TO_SD = 1.4826  # the standard deviation of a normal distribution over its MAD


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """A rise of the loss by `height` nat above its running minimum, from step `first`; last: None if it did not return."""

    first: float
    last: float | None
    height: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """The events of one run. A series that was not logged has no spikes and 0 judged points."""

    non_finite: float | None  # the first step whose loss or gradient norm is NaN or infinite
    rises: tuple[Rise, ...]
    loss_spikes: tuple[float, ...]  # their steps
    grad_spikes: tuple[float, ...]
    loss_judged: int  # points with enough earlier ones to be judged for spikes
    grad_judged: int
    reason: str | None  # why the run counts as diverged, in one sentence


def stability(steps: Sequence[float], loss: Sequence[float], grad_norm: Sequence[float] = ()) -> Stability:
    """Return one run's events. A run diverged if a value is not finite, or if a rise lasts until its end.

    loss in nat and grad_norm by logged step; everything after the first non-finite value is ignored.
    """
    at, losses, norms = (np.asarray(series, dtype=np.float64) for series in (steps, loss, grad_norm))
    broken = ~np.isfinite(losses)
    if norms.size:
        broken |= ~np.isfinite(norms)
    end = int(np.argmax(broken)) if broken.any() else at.size
    at, losses, norms = at[:end], losses[:end], norms[:end]
    non_finite = float(steps[end]) if broken.any() else None
    rises = sustained_rises(at, losses)
    reason = None
    if non_finite is not None:
        what = "loss" if not np.isfinite(loss[end]) else "gradient norm"
        value = loss[end] if what == "loss" else grad_norm[end]
        reason = f"the {what} is {float(value)} at step {non_finite:g}"
    elif rises and rises[-1].last is None:
        rise = rises[-1]
        reason = f"the loss rose {rise.height:.2g} above its minimum from step {rise.first:g} on and did not come back"
    return Stability(
        non_finite=non_finite,
        rises=rises,
        loss_spikes=spikes(at, losses),
        grad_spikes=spikes(at, norms) if norms.size else (),
        loss_judged=max(0, losses.size - FEWEST_BEFORE),
        grad_judged=max(0, norms.size - FEWEST_BEFORE),
        reason=reason,
    )


def sustained_rises(steps: Sequence[float] | Array, loss: Sequence[float] | Array) -> tuple[Rise, ...]:
    """Return the stretches where the median of the last RISE_WINDOW losses exceeds its running minimum by more than RISE.

    The median, because one spike is no divergence; its own minimum, because that of single losses is lower by their noise.
    A run of fewer than two windows has a window of half its length; runs below 4 losses have no rises. The end of a run
    does not end a rise.
    """
    at, losses = np.asarray(steps, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    window = min(RISE_WINDOW, losses.size // 2 | 1)
    if window < 3:  # a rise looks like a spike
        return ()
    medians = np.median(sliding_window_view(losses, window), axis=1)
    over = medians - np.minimum.accumulate(medians)
    ends = at[window - 1 :]
    found = []
    for first, last in _stretches(over > RISE):
        back = float(ends[last]) if last < ends.size else None
        found.append(Rise(first=float(ends[first]), last=back, height=float(over[first:last].max())))
    return tuple(found)


def overfitting(steps: Sequence[float] | Array, losses: Sequence[Sequence[float]] | Array) -> float:
    """Return how far the mean of the seeds' losses (seeds, steps) ends above its minimum, in nat.

    It goes by means over tenths of the steps, because one low point is chance; so is a rise of fewer than SURE standard
    errors over the seeds, which is 0.
    """
    at, curves = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    tenth = np.minimum((10 * (at - at[0]) / max(at[-1] - at[0], 1e-9)).astype(np.int64), 9)
    means = np.stack([curves[:, tenth == k].mean(axis=1) for k in np.unique(tenth)])
    rises = means[-1] - means[means.mean(axis=1).argmin()]
    error = rises.std(ddof=1) / math.sqrt(rises.size) if rises.size > 1 else 0.0
    rise = float(rises.mean())
    return rise if rise > SURE * error else 0.0


def spikes(steps: Sequence[float] | Array, values: Sequence[float] | Array) -> tuple[float, ...]:
    """Return the steps of values x with (x - median) / (1.4826 MAD) > SPIKE over up to SPIKE_WINDOW values before x.

    Only upward spikes count, and of neighbours the highest. The first FEWEST_BEFORE values are not judged. The window is
    trailing and robust, so neither a falling loss nor an earlier spike hides one. If the MAD is 0, every value above the
    median is a spike.
    """
    at, series = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if series.size <= FEWEST_BEFORE:
        return ()
    judged = np.arange(FEWEST_BEFORE, series.size)
    before = sliding_window_view(np.concatenate([np.full(SPIKE_WINDOW, np.inf), series]), SPIKE_WINDOW)
    off = _robust(before[judged], np.minimum(judged, SPIKE_WINDOW), series[judged])
    sizes = np.concatenate([np.zeros(FEWEST_BEFORE), off])
    return tuple(float(at[a + int(np.argmax(sizes[a:b]))]) for a, b in _stretches(sizes > SPIKE))


def rate_bound(events: int, runs: int, confidence: float = 0.95) -> float:
    """Return the exact upper confidence bound of a rate (Clopper & Pearson 1934): 0 of 10 runs only bound it below 26 %."""
    return 1.0 if events == runs else float(betaincinv(events + 1, runs - events, confidence))


def rate_p_value(candidate: tuple[int, int], control: tuple[int, int]) -> float:
    """Return the two-sided p-value of Fisher's exact test that two arms' (events, runs) have one rate."""
    from scipy.stats import fisher_exact  # here, because the import takes a second

    table = [[events, runs - events] for events, runs in (candidate, control)]
    return float(fisher_exact(table, alternative="two-sided").pvalue)


def _robust(before: Array, known: NDArray[np.int64], values: Array) -> Array:
    """Return (x - median) / (1.4826 MAD) of each value over its row of earlier values, all but `known` of them infinite."""
    median = _median(before, known)
    # The infinite values have infinite deviations, so they sort last here too.
    spread = TO_SD * _median(np.abs(before - median[:, None]), known)
    off = values - median
    return np.divide(off, spread, out=np.where(off > 0, np.inf, 0.0), where=spread > 0)


def _median(rows: Array, known: NDArray[np.int64]) -> Array:
    """Return the median of each row's `known` smallest values; np.median in a loop takes twenty times as long."""
    ordered = np.sort(rows, axis=1)
    middle = np.stack([(known - 1) // 2, known // 2], axis=1)
    return np.asarray(np.take_along_axis(ordered, middle, axis=1).mean(axis=1))


def _stretches(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return [first, last) of every run of True."""
    turns = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(turns[::2], turns[1::2], strict=True)]
