"""Turn records into numbers: medians, means, ratios with intervals. A value that was not measured is None."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from te_bench.experiments.spec import Record
from te_bench.reports.analysis.rows import Configuration

CONFIDENCE = 0.95
LONGEST = 1e9  # seconds, 30 years: longer times are invalid

Process = tuple[str, int]  # run and seed
Values = Mapping[Process, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """The geometric mean of n paired ratios, with its 95 % t-interval on the logarithms; no interval for n < 2."""

    value: float
    n: int
    low: float | None = None
    high: float | None = None

    @property
    def inverse(self) -> "Ratio":
        """The inverse ratio, with its interval."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return Ratio(value=1 / self.value, n=self.n, low=low, high=high)


def numbers(values: object) -> list[float]:
    """Return the finite numbers among recorded values; None and a missing key drop out."""
    if not isinstance(values, Iterable):
        return []
    values = list(values)
    if set(map(type, values)) == {float} and math.isfinite(sum(values)):  # a page reads millions
        return values
    return [number for number in map(finite, values) if number is not None]


def seconds_of(record: Record, sample: str) -> list[float]:
    """Return the valid times among a record's samples of a kind: above 0 and below LONGEST."""
    return [time for time in numbers(record.samples.get(sample)) if 0 < time < LONGEST]


def step_seconds(samples: Mapping[str, object]) -> float | None:
    """Return the seconds per step of a training curve, or None if it is too short.

    The loss is read every few steps, and all steps of one read have its time. The clock runs from the end of the first read
    with a time above 0, because compiling steps have none, to the end of the last read.
    """
    steps, times = (numbers(samples.get(name)) for name in ("step", "time_s"))
    first = next((time for time in times if time > 0), None)
    if first is None or len(steps) != len(times):
        return None
    end = max(i for i, time in enumerate(times) if time == first)
    return (times[-1] - first) / (steps[-1] - steps[end]) if steps[-1] > steps[end] else None


def finite(value: object) -> float | None:
    if type(value) is float:
        return value if math.isfinite(value) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def highest(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def beyond_held(records: Iterable[Record]) -> float | None:
    """Return the most bytes that a record allocated beyond what it held; None if no record has both numbers."""
    peaks = [
        peak - held
        for record in records
        if (held := finite(record.work.get("held_bytes"))) is not None
        and (peak := highest(numbers(record.samples.get("peak_allocated_bytes")))) is not None
    ]
    return highest(peaks)


def quantile(values: Sequence[float], q: float) -> float | None:
    """Return the q-quantile, by linear interpolation between order statistics; None without values."""
    return float(np.quantile(values, q)) if values else None


def geometric_mean(ratios: Sequence[float]) -> Ratio | None:
    """Return exp(mean(log r)) with the 95 % t-interval of the mean, n - 1 degrees of freedom; None without ratios."""
    if not ratios:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    centre, n = statistics.fmean(logs), len(logs)
    if n < 2:
        return Ratio(value=math.exp(centre), n=n)
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(logs) / math.sqrt(n)
    return Ratio(value=math.exp(centre), n=n, low=math.exp(centre - half), high=math.exp(centre + half))


def of_processes(records: Iterable[Record], sample: str) -> float | None:
    """Return the geometric mean over processes of each process's median of one kind of sample."""
    found = geometric_mean([value for record in records if (value := of_process(record, sample))])
    return found.value if found else None


def typical(records: Iterable[Record], sample: str) -> float | None:
    """Return the median over processes of each process's median; one disturbed process does not move it."""
    return median([value for record in records if (value := of_process(record, sample))])


def of_process(record: Record, sample: str) -> float | None:
    """Return the median of one process's times of a kind; None if it has none."""
    return median(seconds_of(record, sample))


def speedup(baseline: Configuration, configuration: Configuration) -> Ratio | None:
    """Return the baseline's median latency over the configuration's, paired by run and seed; None if their work differs.

    The baseline's own speed-up is 1, without an interval.
    """
    if configuration.id == baseline.id:
        return Ratio(value=1.0, n=len(configuration.ok))
    if not same_work(baseline, configuration):
        return None
    return paired_ratio(baseline, configuration, "latency_s")


def paired_ratio(slower: Configuration, faster: Configuration, *samples: str) -> Ratio | None:
    """Return the seconds of `slower` over those of `faster`, paired by run and seed; each sums a process's medians."""
    theirs, ours = (seconds_by_seed(each, *samples) for each in (slower, faster))
    logs = {pair: math.log(theirs[pair] / ours[pair]) for pair in ours if pair in theirs}
    return geometric_mean([math.exp(log) for log in independent(logs, gpus_by_seed(slower), gpus_by_seed(faster))])


def independent(pairs: Values, *gpus: Mapping[Process, str | None]) -> list[float]:
    """Return the pairs' values, or their one mean where all are of the same two GPUs, in that order.

    Two chips differ, by 2 % for instance, alike in each of their pairs: such pairs are one observation, however many. In a
    sweep over several GPUs the pairs' GPUs change places, and their values vary by that.
    """
    [of, *others] = {tuple(one.get(pair) for one in gpus) for pair in pairs} or [()]
    if not others and len({*of} - {None}) > 1:
        return [statistics.fmean(pairs.values())]
    return list(pairs.values())


def gpus_by_seed(configuration: Configuration) -> dict[Process, str | None]:
    """Return {(run, seed): the uuid of the GPU that the process ran on}; None on a CPU."""
    return {
        (row.run, row.trial.seed): (row.record.device_state or {}).get("uuid")
        for row in configuration.rows
        if row.record
    }


def same_work(one: Configuration, other: Configuration) -> bool:
    """Return whether two configurations' steps process equally many tokens."""
    return len({record.work.get("tokens") for configuration in (one, other) for record in configuration.ok}) < 2


def seconds_by_seed(configuration: Configuration, *samples: str) -> dict[Process, float]:
    """Return {(run, seed): sum of the process's medians of these samples} for processes that have all of them."""
    found = {}
    for row in configuration.rows:
        if row.record and row.outcome == "ok":
            medians = [of_process(row.record, sample) for sample in samples]
            if all(medians):
                found[row.run, row.trial.seed] = sum(value for value in medians if value)
    return found
