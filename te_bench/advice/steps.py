"""What the records of one step say: its seconds, their extent, its peak of memory. Pure; no torch."""

import math
from collections.abc import Sequence

from te_bench.advice.predict import Frame
from te_bench.experiments.spec import Record
from te_bench.reports.analysis.measures import highest, numbers, of_process, of_processes

CLOSE = 1.02  # times the fastest verified step: such a step is as good
NOISY = 1.2  # the slowest run of a step over the fastest: beyond it a range says more than a mean
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes")


def typical(records: Sequence[Record]) -> float:
    """Seconds of a step: the geometric mean over its processes, as every report has it."""
    return of_processes(records, "latency_s") or math.inf


def extent(records: Sequence[Record]) -> tuple[float, float]:
    """Seconds of a step in its fastest and in its slowest process."""
    found = [seconds for record in records if (seconds := of_process(record, "latency_s"))] or [math.inf]
    return min(found), max(found)


def noisy(records: Sequence[Record]) -> bool:
    """Whether its runs differ by so much that their mean alone would mislead."""
    low, high = extent(records)
    return high > NOISY * low


def peak(records: Sequence[Record]) -> float | None:
    """Bytes at their peak: allocated, where that was recorded, else reserved, else resident."""
    return peaks(records)[0]


def peaks(*steps: Sequence[Record]) -> list[float | None]:
    """The peak of each step, all of the first kind that all have: torch's own graphs show what they reserve alone."""
    for sample in PEAKS:
        found = [highest(v for record in records for v in numbers(record.samples.get(sample))) for records in steps]
        if all(value is not None for value in found):
            return found
    return [None] * len(steps)


def frame_of(records: Sequence[Record]) -> Frame:
    launches = next((n for record in records if isinstance(n := record.work.get("launches"), int)), None)
    return Frame(seconds=typical(records), memory=peak(records), kernels=kernel_seconds(records), launches=launches)


def kernel_seconds(records: Sequence[Record]) -> float | None:
    """Of a GPU's kernels in a step, one after the other; None where none were profiled."""
    found = [sum(profile.values()) for record in records if (profile := record.work.get("kernel_s"))]
    return min(found, default=None)
