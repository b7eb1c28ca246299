"""The learning-rate ladder: where each precision breaks."""

from collections.abc import Mapping
from dataclasses import dataclass

from te_bench.reports.analysis.rows import Configuration, Group
from te_bench.reports.convergence.study import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class StressResult:
    """One precision at one learning rate: the mean final loss, None where no run got there."""

    runs: int
    diverged: int
    final: float | None
    outcome: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StressLadder:
    """The precisions of one model, data and length, by factors of the learning rate."""

    title: str
    factors: tuple[float, ...]
    results: Mapping[str, Mapping[float, StressResult]]


def stress_ladders(group: Group) -> tuple[StressLadder, ...]:
    """A ladder for each model and length."""
    together: dict[tuple[object, ...], list[Configuration]] = {}
    for configuration in group.of("training"):
        if "lr_factor" in configuration.trial.problem:
            together.setdefault(configuration.course, []).append(configuration)
    return tuple(map(_ladder, together.values()))


def _ladder(configurations: list[Configuration]) -> StressLadder:
    results: dict[str, dict[float, StressResult]] = {}
    for configuration in configurations:
        factor = float(str(configuration.trial.problem["lr_factor"]))
        results.setdefault(configuration.trial.recipe or configuration.trial.precision, {})[factor] = _result(
            configuration
        )
    problem = configurations[0].trial.problem
    return StressLadder(
        title=f"{problem.get('model')}, {problem.get('data')}, {problem.get('steps')} steps",
        factors=tuple(sorted({factor for by_factor in results.values() for factor in by_factor})),
        results=results,
    )


def _result(configuration: Configuration) -> StressResult:
    runs = [Run(row) for row in configuration.rows]
    finals = [run.final for run in runs if run.final is not None]
    return StressResult(
        runs=len(runs),
        diverged=sum(1 for run in runs if run.diverged),
        final=sum(finals) / len(finals) if finals else None,
        outcome=configuration.outcome,
    )
