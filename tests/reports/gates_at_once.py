"""The gate's rule over thousands of simulated gates at once, which test_gate.py holds `gate.decide` to gate by gate.

One after the other, by `decide`, 2,000 gates take 11 s. Arrays are (gates, series, looks); the last series is the family.
"""

import functools
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

from te_bench.reports import gate
from te_bench.reports.gate import Verdict
from te_bench.reports.sequential import t_levels
from te_bench.reports.slowdown import trimmed

NEVER = 10**6  # a look that is not there


@dataclass(frozen=True, kw_only=True)
class Gates:
    verdicts: np.ndarray  # (gates, trials + 1)
    pairs: np.ndarray  # (gates,) that were run


def live(logs: np.ndarray, most: int, *, looks: tuple[int, ...], margin: float = 0.02, alpha: float = 0.05) -> Gates:
    """Gates on log-ratios (gates, trials, pairs), with time for `most` pairs each: what a gate asks for, suspects first."""
    bar, last = np.log1p(margin), looks[-1]
    mean, se = _estimates(np.concatenate([logs, logs.mean(1, keepdims=True)], axis=1))
    gates, trials = logs.shape[:2]
    verdicts = np.full((gates, trials + 1), Verdict.INCONCLUSIVE, dtype=object)
    have = np.zeros((gates, trials), dtype=int)
    need = np.full((gates, trials), gate.SUSPECT_FROM)
    going, ended = np.arange(gates), np.zeros(gates, dtype=bool)
    while going.size:
        left = most - have[going].sum(1, keepdims=True)  # the trials are served in their order
        have[going] += np.clip(left - (np.cumsum(need, axis=1) - need), 0, need)
        pairs = np.concatenate([have[going], have[going].min(1, keepdims=True)], axis=1)
        verdicts[going] = _decide(
            mean[going], se[going], pairs, np.where(ended[:, None], pairs, last), looks, bar, alpha
        )
        open_ = verdicts[going, :-1] == Verdict.INCONCLUSIVE
        after = np.array(looks)[np.minimum(np.searchsorted(looks, have[going], side="right"), len(looks) - 1)]
        more = np.where(open_, np.maximum(after - have[going], 0), 0)
        so_far = np.take_along_axis(mean[going, :-1], have[going][..., None], -1)[..., 0]
        suspects = more * ((have[going] >= gate.SUSPECT_FROM) & (so_far > bar))
        on = ~ended & more.any(1)
        need = np.where(suspects.any(1, keepdims=True), suspects, more)[on]
        going = going[on]
        ended = have[going].sum(1) == most
        need[ended] = 0
    return Gates(verdicts=verdicts, pairs=have.sum(1))


def _estimates(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Trimmed mean and standard error of the first n log-ratios, at n of the last axis; NaN for fewer than two."""
    mean, se = np.full((2, *logs.shape[:-1], logs.shape[-1] + 1), np.nan)
    for n in range(2, logs.shape[-1] + 1):
        values, g = np.sort(logs[..., :n]), trimmed(n)
        h = n - 2 * g
        winsorized = np.clip(values, values[..., [g]], values[..., [n - g - 1]])
        mean[..., n] = values[..., g : n - g].mean(-1)
        se[..., n] = np.sqrt(winsorized.var(-1) * n / (h * (h - 1)))
    return mean, se


def _decide(
    mean: np.ndarray,
    se: np.ndarray,
    pairs: np.ndarray,
    ends: np.ndarray,
    looks: tuple[int, ...],
    bar: float,
    alpha: float,
) -> np.ndarray:
    """The verdicts of series that have so many pairs; ends: at how many they end, by what is known."""
    at = np.array([_padded(gate.looks_until(n, looks), len(looks), NEVER) for n in range(looks[-1] + 1)])[ends]
    reached = at <= pairs[..., None]
    used = np.where(reached, at, 2)
    m, s = (np.take_along_axis(of, used, -1) for of in (mean, se))
    df = np.array([n - 2 * trimmed(n) - 1 for n in range(looks[-1] + 1)])[used]

    def claimed(t: np.ndarray) -> np.ndarray:
        return _holm(np.where(reached, stdtr(df, t / s), np.inf), ends, looks, alpha)

    slower, passes, faster = claimed(bar - m), claimed(m - bar), claimed(m)
    found = np.full(pairs.shape, Verdict.INCONCLUSIVE, dtype=object)
    found[passes < NEVER] = Verdict.PASS
    found[(passes < NEVER) & (faster <= passes)] = Verdict.IMPROVED
    found[slower < NEVER] = Verdict.REGRESSION
    passed = np.isin(found[:, :-1].astype(str), [Verdict.PASS, Verdict.IMPROVED]).all(1)
    found[passed & (found[:, -1] == Verdict.INCONCLUSIVE), -1] = Verdict.PASS
    return found


def _holm(p: np.ndarray, ends: np.ndarray, looks: tuple[int, ...], alpha: float) -> np.ndarray:
    """(gates, series): the look at which Holm's procedure makes the claim of each, or NEVER."""
    made = np.full(p.shape[:2], NEVER)
    while True:
        left = (made == NEVER).sum(1)
        level = np.zeros(p.shape)
        for divisor in np.unique(left[left > 0]):
            for end in np.unique(ends[left == divisor]):
                of = (left == divisor)[:, None] & (ends == end)
                level[of] = _padded(_levels(gate.looks_until(int(end), looks), alpha, int(divisor)), len(looks), 0.0)
        crossed = p <= level
        new = np.where(crossed.any(-1), crossed.argmax(-1), NEVER)
        new = np.where(made == NEVER, new, made)
        if (new == made).all():
            return made
        made = new


@functools.cache
def _levels(looks: tuple[int, ...], alpha: float, hypotheses: int) -> tuple[float, ...]:
    return t_levels(looks, alpha / min(divisor for divisor in gate._DIVISORS if divisor >= hypotheses))


def _padded(values: tuple[float, ...], size: int, by: float) -> list[float]:
    return [*values, *[by] * (size - len(values))]
