"""Find the largest batch that fits a device's memory."""

import math
from dataclasses import dataclass

from te_bench.reports.analysis.measures import finite, highest, numbers
from te_bench.reports.analysis.rows import Configuration, Group


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """The largest batch that fits, its peak memory in bytes, and the smallest batch that does not fit.

    capped: the search ended there, and larger batches may fit.
    """

    configuration: Configuration
    max_batch: float | None = None
    peak_allocated: float | None = None
    first_failed: float | None = None
    limit_gib: float | None = None
    capped: bool = False


def largest_batches(group: Group) -> tuple[LargestBatch, ...]:
    """Return the configurations' largest batches, largest first; the smallest over repetitions counts."""
    found = [_largest(configuration) for configuration in group.of("max_batch")]
    return tuple(sorted(found, key=lambda m: math.inf if m.max_batch is None else -m.max_batch))


def _largest(configuration: Configuration) -> LargestBatch:
    batches = [value for record in configuration.ok for value in numbers(record.samples.get("max_batch"))]
    largest = min(batches, default=None)
    tries = [attempt for record in configuration.ok for attempt in record.work.get("tries") or []]
    failed = [attempt.get("batch") for attempt in tries if not attempt.get("fits")]
    fitted = [a.get("peak_allocated_bytes") for a in tries if a.get("fits") and a.get("batch") == largest]
    return LargestBatch(
        configuration=configuration,
        max_batch=largest,
        peak_allocated=highest(numbers(fitted)),
        first_failed=min(numbers(failed), default=None),
        capped=all(record.work.get("capped") for record in configuration.ok) and largest is not None,
        limit_gib=finite(configuration.trial.problem.get("memory_limit_gib")),
    )
