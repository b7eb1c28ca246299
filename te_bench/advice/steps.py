"""Read the records of one step: its seconds, their extent, its peak of memory. Estimate how long trials take. No torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from te_bench.advice.candidates import COMPILED
from te_bench.advice.predict import Frame
from te_bench.experiments.adoption import PER_BLOCK
from te_bench.experiments.spec import Record, Trial
from te_bench.reports.analysis.measures import highest, numbers, of_process, of_processes

CLOSE = 1.02  # a step that takes at most this many times the fastest verified step is as good
NOISY = 1.2  # if a step's slowest run exceeds its fastest times this, a range is shown with the mean
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes")
AGAIN = 0.5  # seconds of a repetition over those of a first run, which checks against float64: 0.35 to 0.55 on an H200
SLOWEST = 3.0  # limit of the factor over USUAL: how slow a large model's step is does not tell how long it compiles
#: Expected seconds of a small model's trial, by device and kind, until measured ones replace them.
USUAL = {
    "cuda": {"survey": 15.0, "eager": 15.0, "blocks": 30.0, "compiled": 60.0, "part": 5.0, "compiled part": 15.0},
    "cpu": {"survey": 4.0, "eager": 4.0, "blocks": 8.0, "compiled": 15.0, "part": 1.5, "compiled part": 6.0},
}


def typical(records: Sequence[Record]) -> float:
    """Return the seconds of a step: the geometric mean over its processes, as in every report."""
    return of_processes(records, "latency_s") or math.inf


def extent(records: Sequence[Record]) -> tuple[float, float]:
    """Return the seconds of a step in its fastest process and in its slowest."""
    found = [seconds for record in records if (seconds := of_process(record, "latency_s"))] or [math.inf]
    return min(found), max(found)


def noisy(records: Sequence[Record]) -> bool:
    """Return whether the runs differ so much that their mean alone would mislead."""
    low, high = extent(records)
    return high > NOISY * low


def peak(records: Sequence[Record]) -> float | None:
    """Return the peak of a step in bytes: allocated if recorded, else reserved, else resident."""
    return peaks(records)[0]


def peaks(*steps: Sequence[Record]) -> list[float | None]:
    """Return each step's peak in bytes, of the first kind that all steps have: torch's own graphs show reserved only."""
    for sample in PEAKS:
        found = [highest(v for record in records for v in numbers(record.samples.get(sample))) for records in steps]
        if all(value is not None for value in found):
            return found
    return [None] * len(steps)


def frame_of(records: Sequence[Record]) -> Frame:
    launches = next((n for record in records if isinstance(n := record.work.get("launches"), int)), None)
    return Frame(seconds=typical(records), memory=peak(records), kernels=kernel_seconds(records), launches=launches)


def kernel_seconds(records: Sequence[Record]) -> float | None:
    """Return the seconds of a step's GPU kernels, one after the other; None if none were profiled."""
    found = [sum(profile.values()) for record in records if (profile := record.work.get("kernel_s"))]
    return min(found, default=None)


@dataclass(slots=True)
class Pace:
    """Estimates how long trials take: the mean of the ended trials of the same kind."""

    device: str
    walls: dict[tuple[str, bool], list[float]] = field(default_factory=dict)

    def expected(self, trials: Iterable[Trial]) -> float:
        return sum(self._one(*kind_of(trial)) for trial in trials)

    def _one(self, kind: str, again: bool) -> float:
        """Return the mean of ended trials; if none has ended, USUAL times how slow this model and machine are so far."""
        usual = USUAL[self.device]
        if walls := self.walls.get((kind, again)):
            return sum(walls) / len(walls)
        if again:
            return AGAIN * self._one(kind, False)
        ratios = [sum(known) / len(known) / usual[of] for (of, repeated), known in self.walls.items() if not repeated]
        return usual[kind] * min(sum(ratios) / len(ratios), SLOWEST) if ratios else usual[kind]

    def learn(self, records: Iterable[Record]) -> None:
        for record in records:
            self.walls.setdefault(kind_of(record.trial), []).append(record.wall_s)


def kind_of(trial: Trial) -> tuple[str, bool]:
    """Return the trial's kind, and whether it is a repetition, which is not checked; like trials take about as long."""
    if trial.workload not in ("train_step", "survey"):
        return "compiled part" if trial.mode in COMPILED else "part", False
    if trial.workload == "survey":
        return "survey", False
    kind = "blocks" if trial.mode == PER_BLOCK else "compiled" if trial.mode in COMPILED else "eager"
    return kind, trial.seed > 0
