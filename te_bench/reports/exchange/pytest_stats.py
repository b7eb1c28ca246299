"""What pytest-benchmark says of a benchmark's rounds, from raw seconds: every field of its `stats`, defined as it does."""

import statistics
from collections.abc import Sequence
from typing import Any


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """The `stats` of a benchmark of one round at least in pytest-benchmark's JSON; seconds, ops in 1/s, one call a round.

    Quartiles are medians of the lower and the upper half of an even number of rounds and weighted order statistics of an
    odd one; stddev is the sample's, 0 of one round; outliers are "n beyond mean +- stddev;n beyond 1.5 IQR".
    Source: pytest-benchmark 5.3.1, stats.py.
    """
    ordered = sorted(float(value) for value in seconds)
    mean = statistics.mean(ordered)
    stddev = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    q1, q3 = _quartiles(ordered)
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


def _quartiles(ordered: Sequence[float]) -> tuple[float, float]:
    """Method 2 of an even and method 3 of an odd number of values, in the numbering of Wikipedia's Quartile."""
    n, rest = divmod(len(ordered), 4)
    if len(ordered) == 1:
        return ordered[0], ordered[0]
    if rest in (0, 2):
        half = len(ordered) // 2
        return statistics.median(ordered[:half]), statistics.median(ordered[half:])
    if rest == 1:
        return (
            0.25 * ordered[n - 1] + 0.75 * ordered[n],
            0.75 * ordered[3 * n] + 0.25 * ordered[3 * n + 1],
        )
    return (
        0.75 * ordered[n] + 0.25 * ordered[n + 1],
        0.25 * ordered[3 * n + 1] + 0.75 * ordered[3 * n + 2],
    )
