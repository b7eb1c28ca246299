"""Rank configurations by paired processes: the best, those not distinguished from it with the reason, and the slower.

Of those that share two pairs with another one, that with the least mean time is compared with each other one, process by
process with the same seed. Another is slower if a one-sided t-test of the mean log-ratio says so at 5 % divided by the
number of comparisons, at least two; the rest are not distinguished. The truly fastest is among these with a probability of
95 %, whichever was taken for the best: only an error in its own comparison removes it (Bonferroni; multiple comparisons
with the best, after Gupta 1965, Technometrics 7:225, and Hsu 1984, Ann. Stat. 12:1136). Losses are compared in the same
way, by differences.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from te_bench.experiments import host
from te_bench.reports.analysis.measures import (
    CONFIDENCE,
    Process,
    Ratio,
    Values,
    gpus_by_seed,
    independent,
    same_work,
    seconds_by_seed,
    speedup,
)
from te_bench.reports.analysis.naming import plain_names, whose
from te_bench.reports.analysis.rows import Configuration
from te_bench.reports.analysis.steps import MeasuredStep

FASTEST, TIED, SLOWER = WORDS = "fastest", "not distinguished", "slower"
ALONE, UNPAIRED = "one run", "shares no two runs, or no GPU, with the fastest"  # what cannot be ranked
FEW = 5  # up to this number of processes, words say "only"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Places of the compared items: the best with all that are not distinguished from it, then the worse ones.

    alone: items with one process, or without two seeds in common with the best, which cannot be ranked. If nothing can be
    compared, all items are alone.
    """

    best: tuple[int, ...]
    worse: tuple[int, ...]
    alone: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All places: the best, the worse, then those that cannot be ranked."""
        return (*self.best, *self.worse, *self.alone)


def rank(values: Sequence[Values], gpus: Sequence[Mapping[Process, str | None]] = ()) -> Ranking:
    """Rank by paired differences, smaller is better; `values` come in the order of their estimates, the least first.

    gpus: each item's processes' GPUs, by which pairs of different GPUs count as `independent` says.
    """
    where = gpus or [{}] * len(values)
    for first, least in enumerate(values):
        differences = [
            independent(
                {pair: value - least[pair] for pair, value in found.items() if pair in least}, here, where[first]
            )
            for found, here in zip(values, where, strict=True)
        ]
        if rivals := [place for place, found in enumerate(differences) if place != first and len(found) > 1]:
            break
    else:
        return Ranking(best=(), worse=(), alone=tuple(range(len(values))))
    # At least two: with a single rival, its quoted two-sided 95 % interval could otherwise hold 1.
    worse = tuple(place for place in rivals if _above_0(differences[place], max(2, len(rivals))))
    best = tuple(sorted({first, *rivals} - {*worse}))
    return Ranking(best=best, worse=worse, alone=tuple(p for p in range(len(values)) if p not in (*best, *worse)))


def _above_0(differences: Sequence[float], comparisons: int) -> bool:
    """Return whether the mean is above 0 by a one-sided t-test at 5 % / comparisons; equal values are copies: no."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    least = float(stdtrit(len(differences) - 1, 1 - (1 - CONFIDENCE) / comparisons))
    return error > 0 and statistics.fmean(differences) > least * error


def rank_times(configurations: Sequence[Configuration], *samples: str) -> Ranking:
    """Rank by the logarithms of `seconds_by_seed`: their differences are logarithms of ratios."""
    values = [
        {pair: math.log(seconds) for pair, seconds in seconds_by_seed(one, *samples).items()} for one in configurations
    ]
    return rank(values, [gpus_by_seed(one) for one in configurations])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRanking:
    """Steps, the fastest first, with the Ranking of those that were measured and do the same work."""

    steps: tuple[MeasuredStep, ...]
    fastest: tuple[MeasuredStep, ...] = ()
    slower: tuple[MeasuredStep, ...] = ()
    alone: tuple[MeasuredStep, ...] = ()
    reason: str = ""  # why the fastest are not distinguished

    @property
    def by_pairs(self) -> bool:
        """Whether a step lacks runs of the baseline's, so that its time is the baseline's over the paired speed-up."""
        pairs = [(step.is_baseline, step.speedup.n) for step in self.steps if step.speedup]
        return any(n < most for is_baseline, most in pairs if is_baseline for _, n in pairs)

    def word(self, step: MeasuredStep) -> str | None:
        """Return the word for a step's place; None if it was not ranked."""
        if step in self.fastest:
            return FASTEST if len(self.fastest) == 1 else TIED
        if step in self.slower:
            return SLOWER
        if step in self.alone:
            return ALONE if len(step.configuration.ok) == 1 else UNPAIRED
        return None


def rank_steps(steps: Sequence[MeasuredStep]) -> StepRanking:
    """Return the ranking of steps in the order of `measured_steps`, fastest first."""
    measured = _comparable(steps)
    ranking = rank_times([step.configuration for step in measured], "latency_s")
    fastest, slower, alone = (tuple(measured[p] for p in each) for each in (ranking.best, ranking.worse, ranking.alone))
    reason = why_tied([step.configuration for step in fastest]) if len(fastest) > 1 else ""
    return StepRanking(steps=tuple(steps), fastest=fastest, slower=slower, alone=alone, reason=reason)


def _comparable(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return the measured steps of as many tokens as the baseline's, or as the fastest's where the baseline has no time."""
    measured = [step for step in steps if step.latency_s is not None]
    like = next((step for step in measured if step.is_baseline), measured[0] if measured else None)
    return [step for step in measured if like and same_work(like.configuration, step.configuration)]


@dataclass(frozen=True, kw_only=True, slots=True)
class FastestOfKind:
    """The fastest configuration of one kind and precision, and its seconds over those of the fastest of all, in pairs.

    name: distinguishes it from those of the other kinds.
    """

    kind: str
    name: str
    step: MeasuredStep
    seconds: float
    times_as_long: Ratio | None


def fastest_of_each_kind(steps: Sequence[MeasuredStep]) -> tuple[FastestOfKind, ...]:
    """Return one step of each kind and precision, fastest first, from steps in that order.

    Of the baseline's kind it is the baseline, because speed-ups are quoted against it.
    """
    found: dict[tuple[str, str], tuple[float, MeasuredStep]] = {}
    for step in _comparable(steps):
        trial = step.configuration.trial
        kind = whose(trial), trial.precision
        assert step.latency_s is not None
        if kind not in found or step.is_baseline:
            found[kind] = step.latency_s, step
    ordered = sorted(found.items(), key=lambda item: item[1][0])
    names = plain_names({step.configuration.id: step.configuration.trial for _, (_, step) in ordered})
    return tuple(
        FastestOfKind(
            kind=kind,
            name=names[step.configuration.id],
            step=step,
            seconds=seconds,
            times_as_long=speedup(step.configuration, ordered[0][1][1].configuration),
        )
        for (kind, _), (seconds, step) in ordered
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FastestByShape:
    """How many shapes each way is the fastest on, among shapes with several ways.

    clear: by paired runs. tied: by the joined names of ways that are not distinguished. once: by single runs.
    """

    shapes: int
    clear: Mapping[str, int]
    tied: Mapping[str, int]
    once: Mapping[str, int]


def fastest_by_shape(shapes: Sequence[tuple[Sequence[str], int]]) -> FastestByShape:
    """Count the fastest ways over shapes; each shape: the names of its ways in their Ranking's order, how many are best."""
    clear, tied, once = Counter[str](), Counter[str](), Counter[str]()
    several = [shape for shape in shapes if len(shape[0]) > 1]
    for names, best in several:
        if best > 1:
            tied[" and ".join(sorted(names[:best]))] += 1
        else:
            (clear if best else once)[names[0]] += 1
    return FastestByShape(shapes=len(several), clear=clear, tied=tied, once=once)


def why_tied(configurations: Sequence[Configuration]) -> str:
    """Return why these are not distinguished: the number of processes, and what disturbed the machine if recorded."""
    n = min(len(configuration.ok) for configuration in configurations)
    reasons = [f"{'only ' if n <= FEW else ''}{n} runs of each"]
    states = [record.device_state for configuration in configurations for record in configuration.ok]
    said = [(state.get("cpu_others") or 0.0, busy) for state in states if (busy := host.disturbance(state))]
    if said:
        times = f" in {len(said)} of {len(states)} runs" if len(said) < len(states) else ""
        reasons.append(f"the machine was busy{times}: {max(said)[1]}")
    return "; ".join(reasons)
