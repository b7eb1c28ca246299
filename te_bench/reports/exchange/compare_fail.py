"""pytest-benchmark's --benchmark-compare-fail between two exports, with decimals; a benchmark that is gone fails.

STAT:N%   STAT may grow by N percent.      median:2.5%
STAT:N    STAT may grow by N seconds.      min:0.001, mean:5e-4

Of ops, calls in a second, it is the fall that counts. No statistics: a threshold alone, as those who come from
pytest-benchmark know it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Fields of `stats` that can be judged. Source: pytest-benchmark 5.3.1, whose own grammar takes the first six.
STATS = ("min", "max", "mean", "median", "stddev", "iqr", "q1", "q3", "ld15iqr", "hd15iqr", "total", "ops")
_FALLS = ("ops",)  # what is better the larger it is
_GRAMMAR = re.compile(r"(?P<stat>[a-z0-9]+):(?P<limit>(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?P<percent>%?)", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """How far a statistic may get worse: by `limit` percent, or by `limit` seconds (of ops: 1/s)."""

    stat: str
    limit: float
    percent: bool

    def __str__(self) -> str:
        return f"{self.stat}:{self.limit:g}{'%' if self.percent else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A benchmark that fails a limit; `limit` is None where it is missing, and `change`, in the limit's unit, unknown."""

    fullname: str
    reason: str
    limit: Limit | None = None
    change: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitComparison:
    """What became of a baseline's benchmarks; `added` are those that it does not have."""

    judged: tuple[str, ...]
    added: tuple[str, ...]
    failures: tuple[Failure, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def parse(expression: str) -> Limit:
    """The limit that STAT:N% or STAT:N states, such as median:2.5%. Raises ValueError for anything else."""
    found = _GRAMMAR.fullmatch(expression.strip())
    if found is None or found["stat"] not in STATS or not math.isfinite(float(found["limit"])):
        raise ValueError(
            f"--compare-fail {expression}: write STAT:N% or STAT:N, such as median:2.5% or min:0.001 (seconds), where "
            f"STAT is one of {', '.join(STATS)}"
        )
    return Limit(stat=found["stat"], limit=float(found["limit"]), percent=bool(found["percent"]))


def judge(limits: Sequence[Limit], baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> LimitComparison:
    """Every benchmark of the baseline held to every limit; both are values of pytest-benchmark's JSON.

    A benchmark that the candidate lacks fails once; a statistic that either does not have as a finite number fails its
    limit. Raises ValueError without limits and for a baseline without benchmarks: both would pass anything.
    """
    if not limits:
        raise ValueError("--compare-fail: give at least one limit, such as median:2.5%")
    before, after = _by_name(baseline), _by_name(candidate)
    if not before:
        raise ValueError("the baseline holds no benchmark: there is nothing to compare with, and nothing could fail")
    failures = []
    for name, stats in before.items():
        if name not in after:
            failures.append(Failure(fullname=name, reason="missing from the candidate"))
            continue
        failures += [found for limit in limits if (found := _failure(name, limit, stats, after[name]))]
    added = tuple(name for name in after if name not in before)
    return LimitComparison(judged=tuple(before), added=added, failures=tuple(failures))


def _by_name(value: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {benchmark["fullname"]: benchmark["stats"] for benchmark in value["benchmarks"]}


def _failure(name: str, limit: Limit, before: Mapping[str, Any], after: Mapping[str, Any]) -> Failure | None:
    old, new = (_number(stats.get(limit.stat)) for stats in (before, after))
    if old is None or new is None:
        whose = "baseline" if old is None else "candidate"
        return Failure(fullname=name, limit=limit, reason=f"the {whose} has no number for {limit.stat}")
    worse = old - new if limit.stat in _FALLS else new - old
    if not limit.percent:
        change = worse
    elif old == 0:
        change = math.copysign(math.inf, worse) if worse else 0.0  # from nothing to anything is no percentage
    else:
        change = 100 * worse / old
    if change <= limit.limit:
        return None
    by = f"{change:.3g}%" if limit.percent else f"{change:.3g}"
    verb = "fell" if limit.stat in _FALLS else "grew"
    reason = f"{limit.stat} {verb} by {by}, from {old:.6g} to {new:.6g}; the limit is {limit}"
    return Failure(fullname=name, limit=limit, change=change, reason=reason)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
