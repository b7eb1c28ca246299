"""Report the learning-rate ladder: the rate at which each precision breaks, with an interval over seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from te_bench.reports.analysis.measures import CONFIDENCE, numbers
from te_bench.reports.analysis.naming import arm_name
from te_bench.reports.analysis.rows import Configuration, Group, grouped, printable
from te_bench.reports.convergence.study import Run

REFERENCE = "bf16"
#: A run is also broken if it ends above bf16 by this share of what bf16 learnt at its best rate.
LOST = 0.1

Bracket = tuple[float, float]  # the last factor that held, or 0, and the first that broke, or infinity


@dataclass(frozen=True, kw_only=True, slots=True)
class StressResult:
    """One precision at one learning rate: the final losses of the runs that ended, and their mean."""

    runs: int
    diverged: int
    whole: int  # runs whose seed has a result at every rate
    broke: int  # of these, including diverged ones
    finals: tuple[float, ...]
    final: float | None
    outcome: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Breaking:
    """The factors of the learning rate between which the median seed breaks, and an interval of that median."""

    seeds: int
    median: Bracket
    interval: Bracket
    confidence: float  # of the interval: below 95 % for fewer than 6 seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class StressLadder:
    """The precisions of one model, data and length, by factors of the learning rate."""

    title: str
    rate: float  # the learning rate at factor 1
    factors: tuple[float, ...]
    results: Mapping[str, Mapping[float, StressResult]]
    breaking: Mapping[str, Breaking]
    planted: frozenset[str]  # precisions broken on purpose
    limits: Mapping[float, float]  # {factor: final loss above which a run is broken, mean over bf16's seeds}

    @property
    def unseen(self) -> tuple[str, ...]:
        """Precisions that were broken on purpose and whose median seed is not shown to break at their lowest rate."""
        known = self.planted & self.breaking.keys()
        return tuple(n for n in self.results if n in known and self.breaking[n].median[1] > min(self.results[n]))

    @property
    def earlier(self) -> tuple[str, ...]:
        """Precisions that break at a lower rate than bf16: their interval ends where bf16's begins, or before."""
        bf16 = self.breaking.get(REFERENCE)
        if bf16 is None or bf16.confidence < CONFIDENCE:
            return ()
        known = {name: found for name, found in self.breaking.items() if found.confidence >= CONFIDENCE}
        return tuple(
            name for name, found in known.items() if name not in self.planted and found.interval[1] <= bf16.interval[0]
        )

    def rates(self, factors: Bracket) -> str:
        """Return two factors as learning rates in words."""
        low, high = factors
        if not low:
            return f"below {high * self.rate:g}"
        return f"above {low * self.rate:g}" if math.isinf(high) else f"{low * self.rate:g} to {high * self.rate:g}"


def stress_ladders(group: Group) -> tuple[StressLadder, ...]:
    """Return a ladder for each model, length, batch and schedule."""
    rungs = [one for one in group.of("training") if "lr_factor" in one.trial.problem]
    settings = "batch", "accumulate", "warmup"
    together = grouped(rungs, lambda one: (*one.course, _rate(one), *map(one.trial.problem.get, settings)))
    return tuple(map(_ladder, together.values()))


def breaking_point(brackets: Sequence[Bracket]) -> Breaking:
    """Return the median's interval from order statistics: the k-th least of n seeds to the k-th largest, k as large as 95 %
    allow.

    It holds for any distribution over seeds, and for factors that are only known between two rungs. With n seeds it misses
    the median with probability 2 sum_{i<k} C(n, i) / 2^n (David & Nagaraja 2003, Order Statistics, 7.1).
    """
    n = len(brackets)
    lows, highs = (sorted(ends) for ends in zip(*brackets, strict=True))

    def missed(k: int) -> float:
        return float(2 * sum(math.comb(n, i) for i in range(k)) / 2**n)

    k = max((k for k in range(1, (n + 1) // 2 + 1) if 1 - missed(k) >= CONFIDENCE), default=1)
    median, interval = (lows[(n - 1) // 2], highs[n // 2]), (lows[k - 1], highs[n - k])
    return Breaking(seeds=n, median=median, interval=interval, confidence=max(0.0, 1 - missed(k)))


def _ladder(configurations: list[Configuration]) -> StressLadder:
    by_name: dict[str, dict[float, Configuration]] = {}
    for configuration in configurations:
        factor = float(str(configuration.trial.problem["lr_factor"]))
        by_name.setdefault(printable(arm_name(configuration.trial)), {})[factor] = configuration
    runs = {name: _runs(by_factor) for name, by_factor in by_name.items()}
    reference = runs.get(REFERENCE, {})
    broke = {name: _broke(by_seed, reference) for name, by_seed in runs.items()}
    found = {name: [_bracket(set(runs[name][seed]), at) for seed, at in seeds.items()] for name, seeds in broke.items()}
    breaking = {name: breaking_point(brackets) for name, brackets in found.items() if brackets}
    faults = {name for name, cs in by_name.items() if any(c.trial.problem.get("arm") == "broken" for c in cs.values())}
    factors = tuple(sorted({factor for by_factor in by_name.values() for factor in by_factor}))
    problem = configurations[0].trial.problem
    return StressLadder(
        title=f"{problem.get('model')}, {problem.get('data')}, {problem.get('steps')} steps",
        rate=_rate(configurations[0]),
        factors=factors,
        results={
            name: {f: _result(c, [f in at for at in broke[name].values()]) for f, c in by_factor.items()}
            for name, by_factor in by_name.items()
        },
        breaking=breaking,
        planted=frozenset(faults),
        limits=_mean_limits(reference, factors),
    )


def _rate(configuration: Configuration) -> float:
    """Return the learning rate at factor 1."""
    problem = configuration.trial.problem
    return float(problem["learning_rate"] or 0) / float(str(problem["lr_factor"]))


def _runs(by_factor: Mapping[float, Configuration]) -> dict[int, dict[float, Run]]:
    """Return {seed: {factor: run}} for seeds whose every run ended or diverged."""
    found: dict[int, dict[float, Run]] = {}
    for factor in sorted(by_factor):
        for row in by_factor[factor].rows:
            run = Run(row)
            if run.final is not None or run.diverged:
                found.setdefault(run.seed, {})[factor] = run
    return {seed: runs for seed, runs in found.items() if len(runs) == len(by_factor)}


def _broke(
    by_seed: Mapping[int, Mapping[float, Run]], reference: Mapping[int, Mapping[float, Run]]
) -> dict[int, set[float]]:
    """Return the factors at which each seed broke, compared with bf16 on that seed, or with itself without bf16."""
    return {
        seed: {
            factor
            for factor, run in runs.items()
            if run.diverged or (run.final or 0.0) > _limit(reference.get(seed, runs), factor)
        }
        for seed, runs in by_seed.items()
    }


def _bracket(factors: set[float], broke: set[float]) -> Bracket:
    first = min(broke, default=math.inf)
    return max((factor for factor in factors if factor < first), default=0.0), first


def _limit(runs: Mapping[float, Run], factor: float) -> float:
    """Return the final loss above which a run at this factor is broken.

    It is the best loss at that rate or a lower one, plus LOST of what was learnt at the best rate of all: a rate too low to
    learn much does not count as broken.
    """
    finals = {at: run.final for at, run in runs.items() if run.final is not None and not run.diverged}
    begun = [losses[0] for run in runs.values() if run.record and (losses := numbers(run.record.samples.get("loss")))]
    best = [final for at, final in finals.items() if at <= factor]
    if not best or not begun:
        return math.inf
    return min(best) + LOST * (max(begun) - min(finals.values()))


def _mean_limits(reference: Mapping[int, Mapping[float, Run]], factors: Iterable[float]) -> dict[float, float]:
    """Return {factor: mean limit over seeds} for factors where every seed has one."""
    limits = {factor: [_limit(runs, factor) for runs in reference.values()] for factor in factors}
    return {f: sum(found) / len(found) for f, found in limits.items() if found and all(map(math.isfinite, found))}


def _result(configuration: Configuration, broke: Sequence[bool]) -> StressResult:
    runs = [Run(row) for row in configuration.rows]
    finals = tuple(run.final for run in runs if run.final is not None)
    return StressResult(
        runs=len(runs),
        diverged=sum(bool(run.diverged) for run in runs),
        whole=len(broke),
        broke=sum(broke),
        finals=finals,
        final=sum(finals) / len(finals) if finals else None,
        outcome=configuration.outcome,
    )
