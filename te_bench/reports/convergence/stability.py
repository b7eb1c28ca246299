"""Did a run stay stable: losses that are not numbers, rises that last, spikes, and how sure a rate over few runs is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.special import betaincinv

Array = NDArray[np.float64]

# A rise counts when the median of this many logged losses has it: 8 spikes in a row are still none. In the 6 real runs
# below that median never rose by more than 0.03 over its minimum, single losses by 0.11.
RISE_WINDOW = 17  # odd, for the median of an even number lies between two losses
RISE = 0.5  # nat
SPIKE_WINDOW = 128  # logged points before the one judged, as llm.c's outlier detector
FEWEST_BEFORE = 32  # the MAD of fewer is off by more than 15 %
# In robust standard deviations. Of 29,232 training losses (nanoGPT's character model on an H200, 3 runs in BF16 and 3 in
# FP8, every step) none came above 3.4. Of 400,000 simulated values above 7: normal 0; log-normal with sigma 0.3, as skewed
# as gradient norms are, 1 in 7,000; Student's t with 5 degrees of freedom 1 in 2,600. Hold a candidate's to its control's.
SPIKE = 7.0
TO_SD = 1.4826  # the standard deviation of a normal distribution over its MAD


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """The loss went `height` nat above its running minimum at step `first`; `last` is None when it never came back."""

    first: float
    last: float | None
    height: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """What happened in one run. A series that was not logged has no spikes and 0 judged points: not measured."""

    non_finite: float | None  # the first step whose loss or gradient norm is NaN or infinite
    rises: tuple[Rise, ...]
    loss_spikes: tuple[float, ...]  # their steps
    grad_spikes: tuple[float, ...]
    loss_judged: int  # points with enough before them to be judged for spikes
    grad_judged: int
    reason: str | None  # why the run counts as diverged, one plain sentence


def stability(steps: Sequence[float], loss: Sequence[float], grad_norm: Sequence[float] = ()) -> Stability:
    """One run's events. Diverged: a value that is not finite, or a rise that has not come back when the run ends.

    loss in nat and grad_norm by logged step; what follows the first value that is not finite is not looked at.
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
    """Stretches where the median of the last RISE_WINDOW losses is more than RISE above the least such median before.

    The median, for one spike is no divergence; its own minimum, for that of single losses lies low by their noise. A run
    of fewer than two windows is judged by one of half its length, below 4 losses not at all. The end of a run ends no
    rise.
    """
    at, losses = np.asarray(steps, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    window = min(RISE_WINDOW, losses.size // 2 | 1)
    if window < 3:  # nothing tells a rise from a spike
        return ()
    medians = np.median(sliding_window_view(losses, window), axis=1)
    over = medians - np.minimum.accumulate(medians)
    ends = at[window - 1 :]
    found = []
    for first, last in _stretches(over > RISE):
        back = float(ends[last]) if last < ends.size else None
        found.append(Rise(first=float(ends[first]), last=back, height=float(over[first:last].max())))
    return tuple(found)


def overfitting(steps: Sequence[float] | Array, loss: Sequence[float] | Array) -> float:
    """How far a loss ends above its least, in nat: of means over tenths of the way, for one low point is luck."""
    at, losses = np.asarray(steps, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    tenth = np.minimum((10 * (at - at[0]) / max(at[-1] - at[0], 1e-9)).astype(np.int64), 9)
    means = [float(losses[tenth == k].mean()) for k in np.unique(tenth)]
    return means[-1] - min(means)


def spikes(steps: Sequence[float] | Array, values: Sequence[float] | Array) -> tuple[float, ...]:
    """Steps of values x with (x - median) / (1.4826 MAD) above SPIKE, both over the up to SPIKE_WINDOW values before x.

    Upward only, and of neighbours the highest; the first FEWEST_BEFORE values are not judged. The window is trailing and
    robust, so neither a falling loss nor an earlier spike hides one. Where the MAD is 0, whatever lies above the median is
    a spike.
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
    """The exact upper confidence bound of a rate (Clopper & Pearson 1934): 0 of 10 runs bound it below 26 % only."""
    return 1.0 if events == runs else float(betaincinv(events + 1, runs - events, confidence))


def rate_p_value(candidate: tuple[int, int], control: tuple[int, int]) -> float:
    """Fisher's exact test, two-sided, that two arms' (events, runs) have one rate."""
    from scipy.stats import fisher_exact  # a second to import, which no other page should wait for

    table = [[events, runs - events] for events, runs in (candidate, control)]
    return float(fisher_exact(table, alternative="two-sided").pvalue)


def _robust(before: Array, known: NDArray[np.int64], values: Array) -> Array:
    """(x - median) / (1.4826 MAD) of each value over its own row of values before, of which all but `known` are infinite."""
    median = _median(before, known)
    # The infinite ones are so far off as well.
    spread = TO_SD * _median(np.abs(before - median[:, None]), known)
    off = values - median
    return np.divide(off, spread, out=np.where(off > 0, np.inf, 0.0), where=spread > 0)


def _median(rows: Array, known: NDArray[np.int64]) -> Array:
    """Of the `known` smallest of each row. np.median in a loop over rows of other lengths takes twenty times as long."""
    ordered = np.sort(rows, axis=1)
    middle = np.stack([(known - 1) // 2, known // 2], axis=1)
    return np.asarray(np.take_along_axis(ordered, middle, axis=1).mean(axis=1))


def _stretches(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[first, last) of every run of True."""
    turns = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(turns[::2], turns[1::2], strict=True)]
