"""How long trials take that have not been run. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from te_bench.advice.candidates import COMPILED
from te_bench.experiments.spec import Record, Trial

AGAIN = 0.5  # of a step's first run, which is checked against float64: 0.35 to 0.55 of it on an H200
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
    walls: dict[tuple[str, bool], list[float]] = field(default_factory=dict)

    def expected(self, trials: Iterable[Trial]) -> float:
        return sum(self._one(*kind_of(trial)) for trial in trials)

    def _one(self, kind: str, again: bool) -> float:
        """Of a kind that none has ended of: the usual, times what this model and machine have taken of the usual so far."""
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
    """Trials of one kind take about as long; a step that ran before by another seed is not checked again."""
    if trial.workload not in ("train_step", "survey"):
        return "compiled part" if trial.mode in COMPILED else "part", False
    kind = "survey" if trial.workload == "survey" else "compiled" if trial.mode in COMPILED else "eager"
    return kind, trial.seed > 0
