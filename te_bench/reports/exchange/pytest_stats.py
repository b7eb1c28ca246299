"""Compute pytest-benchmark's `stats` of a benchmark's rounds, and its --benchmark-compare-fail, with decimals.

STAT:N%   STAT may grow by N percent.      median:2.5%
STAT:N    STAT may grow by N seconds.      min:0.001, mean:5e-4

For ops (calls a second) a fall counts. There are no statistics: only a threshold, as in pytest-benchmark.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Fields of `stats` that can be judged. Source: pytest-benchmark 5.3.1, whose own grammar takes the first six.
STATS = ("min", "max", "mean", "median", "stddev", "iqr", "q1", "q3", "ld15iqr", "hd15iqr", "total", "ops")
_FALLS = ("ops",)  # statistics that are better if larger
_GRAMMAR = re.compile(r"(?P<stat>[a-z0-9]+):(?P<limit>(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?P<percent>%?)", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """How much worse a statistic may become: by `limit` percent, or by `limit` seconds (for ops: 1/s)."""

    stat: str
    limit: float
    percent: bool

    def __str__(self) -> str:
        return f"{self.stat}:{self.limit:g}{'%' if self.percent else ''}"


def parse(expression: str) -> Limit:
    """Return the limit that STAT:N% or STAT:N states, such as median:2.5%. Raises ValueError for anything else."""
    found = _GRAMMAR.fullmatch(expression.strip())
    if found is None or found["stat"] not in STATS or not math.isfinite(float(found["limit"])):
        raise ValueError(
            f"--compare-fail {expression}: write STAT:N% or STAT:N, such as median:2.5% or min:0.001 (seconds), where "
            f"STAT is one of {', '.join(STATS)}"
        )
    return Limit(stat=found["stat"], limit=float(found["limit"]), percent=bool(found["percent"]))


def why_exceeded(limit: Limit, baseline: Mapping[str, float], candidate: Mapping[str, float]) -> str | None:
    """Return by how much the statistic exceeds its limit, in words, or None; both are `pytest_stats.summary`'s."""
    old, new = baseline[limit.stat], candidate[limit.stat]
    worse = old - new if limit.stat in _FALLS else new - old
    if not limit.percent:
        change = worse
    elif old == 0:
        change = math.copysign(math.inf, worse) if worse else 0.0  # a percentage of 0 is undefined
    else:
        change = 100 * worse / old
    if change <= limit.limit:
        return None
    by = f"{change:.3g}%" if limit.percent else f"{change:.3g}"
    verb = "fell" if limit.stat in _FALLS else "grew"
    return f"{limit.stat} {verb} by {by}, from {old:.6g} to {new:.6g}; the limit is {limit}"


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Return pytest-benchmark's JSON `stats` of one round or more; in seconds, ops in 1/s, one call a round.

    Quartiles are the medians of the lower and upper half if the number of rounds is even, else weighted order statistics.
    stddev is the sample's, and 0 for one round. outliers are "n beyond mean +- stddev;n beyond 1.5 IQR".
    Source: pytest-benchmark 5.3.1, stats.py.
    """
    import numpy as np  # here, because `te-bench gate --help` must not wait for it

    ordered = sorted(float(value) for value in seconds)
    mean = statistics.mean(ordered)
    stddev = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    q1, q3 = (float(q) for q in np.quantile(ordered, (0.25, 0.75), method="hazen"))
    iqr = q3 - q1
    fences = q1 - 1.5 * iqr, q3 + 1.5 * iqr
    within = [value for value in ordered if fences[0] <= value <= fences[1]]
    n_iqr = len(ordered) - len(within)
    n_stddev = sum(not mean - stddev <= value <= mean + stddev for value in ordered)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": stddev,
        "rounds": len(ordered),
        "median": statistics.median(ordered),
        "iqr": iqr,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": n_iqr,
        "stddev_outliers": n_stddev,
        "outliers": f"{n_stddev};{n_iqr}",
        "ld15iqr": within[0],
        "hd15iqr": within[-1],
        "ops": len(ordered) / sum(ordered) if sum(ordered) else 0.0,
        "total": sum(ordered),
        "data": list(seconds),
        "iterations": 1,
    }
