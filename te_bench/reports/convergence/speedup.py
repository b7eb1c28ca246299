"""Compute the capability-matched speed-up: how much less time a candidate takes to the control's final loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from te_bench.reports.analysis.measures import CONFIDENCE, Ratio, geometric_mean

Array = NDArray[np.float64]

LAST = 0.25  # the last share of training, where the slope is fitted, and the farthest that it is extrapolated
LATEST = LAST / 2  # where it is fitted again, because a loss whose rate decays flattens
FEWEST_POINTS = 3  # any two points fit a line
APART = "no pair shares a host"

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """What the gap costs in steps, and what faster steps save; `reason` says why a field is None.

    Intervals are 95 %, over both slopes of `capability_matched`. `less_time` is a share of the control's time: 0.05 is 5 %
    less, below 0 is more. `step_time` leaves out pairs whose two runs were timed on different hosts; `across_hosts` is
    their number.
    """

    more_steps: float | None = None  # mean gap / |slope|: steps that the candidate needs more; below 0, fewer
    more_steps_interval: Interval | None = None
    step_time: Ratio | None = None  # candidate's seconds per step over the control's
    less_time: float | None = None
    less_time_interval: Interval | None = None
    reason: str | None = None
    across_hosts: int = 0

    @property
    def within_hosts(self) -> str | None:
        """How many pairs the step time uses, in words; None if it uses all."""
        if not self.across_hosts:
            return None
        if self.step_time is None:
            return APART
        return f"{self.step_time.n} of {self.step_time.n + self.across_hosts} pairs share a host"

    @property
    def to_equal_loss(self) -> Ratio | None:
        """How many times as fast the candidate reaches the control's final loss: step speed-up over step penalty."""
        if self.less_time is None or self.step_time is None or self.less_time >= 1:
            return None
        low, high = (None, None) if self.less_time_interval is None else self.less_time_interval
        if low is None or high is None:
            return Ratio(value=1 / (1 - self.less_time), low=None, high=None, n=self.step_time.n)
        return Ratio(value=1 / (1 - self.less_time), low=1 / (1 - low), high=1 / (1 - high), n=self.step_time.n)


def capability_matched(
    steps: Sequence[float],
    control: Sequence[Sequence[float]],
    candidate_final: Sequence[float],
    *,
    control_step_s: Sequence[float],
    candidate_step_s: Sequence[float],
    across_hosts: int = 0,
) -> Speedup:
    """Return 1 - r (1 + gap / (|slope| N)): the time saved to the control's final loss, N steps, r the ratio of step times.

    control: (n, steps) validation losses, in nat, of the control's runs; candidate_final: the candidate's losses at the
    last of these steps; run i of both has the same seed. Step times are in seconds, one for each process (its median,
    because steps of one process are no repetitions), in pairs measured side by side. Pairs that were timed on different
    hosts are left out; across_hosts is their number.

    The slope is that of a line through the last quarter of each control run. A schedule that decays the learning rate
    flattens its end, and a longer run would decay later. So the slope only approximates the effect of more steps, and the
    step penalty is a rough number. Intervals hold this doubt: each goes from the smaller lower end to the larger upper end
    of two, one by this slope and one by that of the last eighth (at least the last three losses; two, if the quarter has
    three).

    gap / slope is a ratio of means over the same seeds: Fieller's interval (1954, J. R. Stat. Soc. B 16:175). The interval
    of the step time is combined with it by recovered variances (MOVER: Zou & Donner 2008, Stat. Med. 27:1693).
    """
    at, losses = np.asarray(steps, dtype=np.float64), np.asarray(control, dtype=np.float64)
    step_time = geometric_mean([ours / theirs for ours, theirs in zip(candidate_step_s, control_step_s, strict=True)])
    gaps = np.asarray(candidate_final, dtype=np.float64) - losses[:, -1]
    gap = float(gaps.mean())
    known: dict[str, Any] = {"step_time": step_time, "across_hosts": across_hosts}
    late = at >= (1 - LAST) * at[-1]
    if late.sum() < FEWEST_POINTS:
        few = f"the last quarter has {late.sum()} validation losses: evaluate {FEWEST_POINTS} times in it at least"
        return Speedup(**known, reason=few)
    slopes = np.polyfit(at[late], losses[:, late].T, 1)[0]
    slope = float(slopes.mean())
    if slope >= 0:
        flat = f"the control's loss does not fall over the last quarter (slope {slope:+.2g} a step)"
        return Speedup(**known, reason=f"{flat}: no steps make up a gap")
    reach = LAST * at[-1] * -slope
    if abs(gap) > reach:
        far = f"the gap is {abs(gap) / reach:.2g} times what the control gained in the last quarter"
        return Speedup(**known, reason=f"{far}: too far to extrapolate")
    more, end = -gap / slope, float(at[-1])
    latest = max(int((at >= (1 - LATEST) * end).sum()), min(FEWEST_POINTS, int(late.sum()) - 1))
    end_slopes = np.polyfit(at[-latest:], losses[:, -latest:].T, 1)[0]
    end_slope = float(end_slopes.mean())
    interval, also = fieller(gaps, -slopes), fieller(gaps, -end_slopes) if end_slope < 0 else None
    less_time, less_interval, reason = _less_time(more, interval, end, step_time)
    _, less_also, unsure = _less_time(-gap / (end_slope or slope), also, end, step_time)
    if interval is None:
        reason = "no interval: one seed" if len(gaps) < 2 else "no interval: these seeds do not tell the slope from 0"
    elif also is None:
        reason = "no interval: these seeds do not tell the slope of the last eighth from 0"
    else:
        reason = reason or unsure
    if step_time is None and across_hosts:
        reason = APART
    return Speedup(
        **known,
        more_steps=more,
        more_steps_interval=_hull(interval, also),
        less_time=less_time,
        less_time_interval=_hull(less_interval, less_also),
        reason=reason,
    )


def _hull(one: Interval | None, other: Interval | None) -> Interval | None:
    """Return the interval from the smaller lower end to the larger upper end; None if either is unknown."""
    return None if one is None or other is None else (min(one[0], other[0]), max(one[1], other[1]))


def _less_time(
    more: float, interval: Interval | None, steps: float, step_time: Ratio | None
) -> tuple[float | None, Interval | None, str | None]:
    """Return the share of time saved, its interval, and why one of them is None."""
    if step_time is None:
        return None, None, "no step times were measured"
    factor = 1 + more / steps  # the candidate's steps over the control's
    less = 1 - step_time.value * factor
    if step_time.low is None or step_time.high is None or interval is None:
        return less, None, "no interval: the step times of one process only"
    factors, ratios = (1 + interval[0] / steps, 1 + interval[1] / steps), (step_time.low, step_time.high)
    if factors[0] <= 0:
        return less, None, "no interval: the slope may be so small that the candidate needs no step at all"
    # Both are independent, so distances of their logarithms add as squares.
    centre = math.log(factor) + math.log(step_time.value)
    down = math.hypot(math.log(factor / factors[0]), math.log(step_time.value / ratios[0]))
    up = math.hypot(math.log(factors[1] / factor), math.log(ratios[1] / step_time.value))
    return less, (1 - math.exp(centre + up), 1 - math.exp(centre - down)), None


def fieller(numerators: Sequence[float] | Array, denominators: Sequence[float] | Array) -> Interval | None:
    """Return the 95 % interval of mean(x) / mean(y) over n pairs: all r for which x - r y does not differ from 0 (df n - 1).

    None if it is unbounded, because the denominator's mean does not differ from 0, and below 2 pairs.
    """
    x, y = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if x.size < 2:
        return None
    q = float(stdtrit(x.size - 1, (1 + CONFIDENCE) / 2)) ** 2 / x.size
    mean_x, mean_y = float(x.mean()), float(y.mean())
    (var_x, covariance), (_, var_y) = np.cov(x, y).tolist()
    # (mean_x - r mean_y)^2 <= q (var_x - 2 r covariance + r^2 var_y), a parabola in r
    a, b, c = mean_y**2 - q * var_y, mean_x * mean_y - q * covariance, mean_x**2 - q * var_x
    if a <= 0:
        return None
    root = math.sqrt(max(b * b - a * c, 0.0))
    return (b - root) / a, (b + root) / a
