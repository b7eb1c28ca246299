"""The gate's rule over thousands of simulated gates at once, which test_decision.py holds `decision.decide` to gate by gate.

One after the other, by `decide`, 2,000 gates take 11 s. Arrays are (gates, series, looks); of several trials the last series
is the family.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

from te_bench.gate import decision
from te_bench.gate import looks as gate_looks
from te_bench.gate.decision import GateVerdict
from te_bench.gate.slowdown import MOST_ALIKE, SURE, trimmed
from te_bench.reports.convergence.sequential import t_levels

NEVER = 10**6  # a look that is not there


@dataclass(frozen=True, kw_only=True)
class Gates:
    verdicts: np.ndarray  # (gates, trials + 1), or (gates, 1)
    pairs: np.ndarray  # (gates,) that were run


@dataclass(frozen=True, kw_only=True)
class Time:
    """What a process counts by, or the mean of its calls: of the first n log-ratios, at n of the last axis."""

    mean: np.ndarray
    se: np.ndarray  # of independent pairs
    alike: np.ndarray  # autocorrelation
    df: np.ndarray
    bar: float


def live(
    logs: np.ndarray,
    most: int,
    *,
    looks: tuple[int, ...],
    margin: float = 0.02,
    alpha: float = 0.05,
    means: np.ndarray | None = None,
) -> Gates:
    """Gates on log-ratios (gates, trials, pairs), with time for `most` pairs each: what a gate asks for, suspects first."""
    last = looks[-1]
    times = [_time(logs, margin, trim=True)]
    times += [] if means is None else [_time(means, decision.MEAN_MARGINS * margin, trim=False)]
    gates, trials = logs.shape[:2]
    verdicts = np.full((gates, trials + (trials > 1)), GateVerdict.INCONCLUSIVE, dtype=object)
    have = np.zeros((gates, trials), dtype=int)
    need = np.full((gates, trials), decision.SUSPECT_FROM)
    going, ended = np.arange(gates), np.zeros(gates, dtype=bool)
    while going.size:
        left = most - have[going].sum(1, keepdims=True)  # the trials are served in their order
        have[going] += np.clip(left - (np.cumsum(need, axis=1) - need), 0, need)
        pairs = have[going]
        pairs = np.concatenate([pairs, pairs.min(1, keepdims=True)], axis=1) if trials > 1 else pairs
        ends = np.where(ended[:, None], pairs, last)
        verdicts[going] = _decide(times, going, pairs, ends, looks, alpha)
        open_ = verdicts[going, :trials] == GateVerdict.INCONCLUSIVE
        after = np.array(looks)[np.minimum(np.searchsorted(looks, have[going], side="right"), len(looks) - 1)]
        more = np.where(open_, np.maximum(after - have[going], 0), 0)
        above = [
            np.take_along_axis(time.mean[going, :trials], have[going][..., None], -1)[..., 0] > time.bar
            for time in times
        ]
        suspects = more * ((have[going] >= decision.SUSPECT_FROM) & np.any(above, axis=0))
        on = ~ended & more.any(1)
        need = np.where(suspects.any(1, keepdims=True), suspects, more)[on]
        going = going[on]
        ended = have[going].sum(1) == most
        need[ended] = 0
    return Gates(verdicts=verdicts, pairs=have.sum(1))


def _time(logs: np.ndarray, margin: float, *, trim: bool) -> Time:
    """Trimmed mean, or mean, and standard error; NaN for fewer than two."""
    if logs.shape[1] > 1:
        logs = np.concatenate([logs, logs.mean(1, keepdims=True)], axis=1)
    mean, se, alike = np.full((3, *logs.shape[:-1], logs.shape[-1] + 1), np.nan)
    cut = [trimmed(n) if trim else 0 for n in range(logs.shape[-1] + 1)]
    for n in range(2, logs.shape[-1] + 1):
        values, g = np.sort(logs[..., :n]), cut[n]
        h = n - 2 * g
        off = np.clip(logs[..., :n], values[..., [g]], values[..., [n - g - 1]])
        off -= off.mean(-1, keepdims=True)
        squares = (off**2).sum(-1)
        found = (off[..., 1:] * off[..., :-1]).sum(-1) / squares + 1 / n
        alike[..., n] = found / max(1 - 4 / n, 1 / 3)
        mean[..., n] = values[..., g : n - g].mean(-1)
        se[..., n] = np.sqrt(squares / (h * (h - 1)))
    df = np.array([n - 2 * g - 1 for n, g in enumerate(cut)])
    return Time(mean=mean, se=se, alike=alike, df=df, bar=np.log1p(margin))


def _alike(of: Time, gates: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """(gates, series): the bound on the autocorrelation of each, by the pairs that there are."""
    own = np.take_along_axis(of.alike[gates], pairs[..., None], -1)[..., 0]
    trials = max(pairs.shape[1] - 1, 1)  # all but the family
    known = np.where(pairs >= 3, pairs, 0)
    total = known[:, :trials].sum(1, keepdims=True)
    together = np.where(known > 0, known * own, 0)[:, :trials].sum(1, keepdims=True) / np.maximum(total, 1)
    off, off_own = (SURE / np.sqrt(np.maximum(n, 1e-9)) for n in (total, known))
    shown = np.where(own - off_own > together, own, 0.0)
    return np.clip(np.maximum(together + off, shown), 0, MOST_ALIKE)


def _widening(n: np.ndarray, r: np.ndarray) -> np.ndarray:
    """As `slowdown.widening`."""
    more = 2 * r / (1 - r) * (1 - (1 - r**n) / (n * (1 - r)))
    return np.sqrt((1 + more) / (1 - more / (n - 1)))


def _decide(
    times: list[Time], gates: np.ndarray, pairs: np.ndarray, ends: np.ndarray, looks: tuple[int, ...], alpha: float
) -> np.ndarray:
    """The verdicts of series that have so many pairs; ends: at how many they end, by what is known."""
    at = np.array([_padded(decision.looks_until(n, looks), len(looks), NEVER) for n in range(looks[-1] + 1)])[ends]
    reached = at <= pairs[..., None]
    used = np.where(reached, at, 2)

    widened = [_widening(used, _alike(of, gates, pairs)[..., None] + np.zeros(used.shape)) for of in times]

    def p_values(kind: int, bar: float, sign: int) -> np.ndarray:
        m, s = (np.take_along_axis(values[gates], used, -1) for values in (times[kind].mean, times[kind].se))
        t = sign * (m - bar) / (s * widened[kind])
        return np.where(reached, stdtr(times[kind].df[used], t), np.inf)

    shares = (1.5, 3.0) if len(times) == 2 else (1.0,)
    slower = _holm([p_values(i, of.bar, -1) for i, of in enumerate(times)], ends, looks, alpha, shares, np.minimum)
    passes = _holm([p_values(i, of.bar, 1) for i, of in enumerate(times)], ends, looks, alpha, (1.0, 1.0), np.maximum)
    faster = _holm([p_values(0, 0.0, 1)], ends, looks, alpha, (1.0,), np.minimum)
    found = np.full(pairs.shape, GateVerdict.INCONCLUSIVE, dtype=object)
    found[passes < NEVER] = GateVerdict.PASS
    found[(passes < NEVER) & (faster <= passes)] = GateVerdict.IMPROVED
    found[slower < NEVER] = GateVerdict.REGRESSION
    if pairs.shape[1] > 1:
        passed = np.isin(found[:, :-1].astype(str), [GateVerdict.PASS, GateVerdict.IMPROVED]).all(1)
        found[passed & (found[:, -1] == GateVerdict.INCONCLUSIVE), -1] = GateVerdict.PASS
    return found


def _holm(
    times: list[np.ndarray],
    ends: np.ndarray,
    looks: tuple[int, ...],
    alpha: float,
    shares: tuple[float, ...],
    of_both: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray:
    """(gates, series): the look at which Holm's procedure makes the claim of each, or NEVER.

    times: the p-values of each; of_both: the look of a claim by those of its times.
    """
    made = np.full(times[0].shape[:2], NEVER)
    while True:
        left = (made == NEVER).sum(1)
        claimed = []
        for p, share in zip(times, shares, strict=False):
            level = np.zeros(p.shape)
            for divisor in np.unique(left[left > 0]):
                for end in np.unique(ends[left == divisor]):
                    of = (left == divisor)[:, None] & (ends == end)
                    levels = _levels(decision.looks_until(int(end), looks), alpha, share * int(divisor))
                    level[of] = _padded(levels, len(looks), 0.0)
            crossed = p <= level
            claimed.append(np.where(crossed.any(-1), crossed.argmax(-1), NEVER))
        new = np.where(made == NEVER, functools.reduce(of_both, claimed), made)
        if (new == made).all():
            return made
        made = new


@functools.cache
def _levels(looks: tuple[int, ...], alpha: float, hypotheses: float) -> tuple[float, ...]:
    return t_levels(looks, alpha / gate_looks.divisor(hypotheses))


def _padded(values: tuple[float, ...], size: int, by: float) -> list[float]:
    return [*values, *[by] * (size - len(values))]
