"""How long trials take that have not been run. No torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from te_bench.advice.candidates import COMPILED
from te_bench.experiments.spec import Record, Trial

SLOWEST = 3.0  # times the usual: a large model's step says no more of how long it takes to compile it
#: Seconds of a trial before any was run, by device and kind, of a small model; the run's own replace them.
USUAL = {
    "cuda": {"survey": 15.0, "eager": 15.0, "compiled": 60.0, "part": 5.0, "compiled part": 15.0},
    "cpu": {"survey": 4.0, "eager": 4.0, "compiled": 15.0, "part": 1.5, "compiled part": 6.0},
}


@dataclass(slots=True)
class Pace:
    """How long trials take: the mean of those of their kind that have ended."""

    device: str
    walls: dict[str, list[float]] = field(default_factory=dict)

    def expected(self, trials: Iterable[Trial]) -> float:
        return sum(self._one(kind_of(trial)) for trial in trials)

    def _one(self, kind: str) -> float:
        """Of a kind that none has ended of: the usual, times what this model and machine have taken of the usual so far."""
        usual = USUAL[self.device]
        if walls := self.walls.get(kind):
            return sum(walls) / len(walls)
        ratios = [sum(known) / len(known) / usual[of] for of, known in self.walls.items()]
        return usual[kind] * min(sum(ratios) / len(ratios), SLOWEST) if ratios else usual[kind]

    def learn(self, records: Iterable[Record]) -> None:
        for record in records:
            self.walls.setdefault(kind_of(record.trial), []).append(record.wall_s)


def kind_of(trial: Trial) -> str:
    """Trials of one kind take about as long."""
    if trial.workload not in ("train_step", "survey"):
        return "compiled part" if trial.mode in COMPILED else "part"
    return "survey" if trial.workload == "survey" else "compiled" if trial.mode in COMPILED else "eager"


def lasting(seconds: float) -> str:
    """10 s, 4 min, 1.5 h: rounded up, for it says what to allow. Without its space it is a --budget."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 3600 else f"{math.ceil(seconds / 360) / 10:g} h"
