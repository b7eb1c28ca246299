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
    for cell in group.of("training"):
        if "lr_factor" in cell.trial.problem:
            together.setdefault(cell.course, []).append(cell)
    return tuple(map(_ladder, together.values()))


def _ladder(cells: list[Configuration]) -> StressLadder:
    results: dict[str, dict[float, StressResult]] = {}
    for cell in cells:
        factor = float(str(cell.trial.problem["lr_factor"]))
        results.setdefault(cell.trial.recipe or cell.trial.precision, {})[factor] = _result(cell)
    problem = cells[0].trial.problem
    return StressLadder(
        title=f"{problem.get('model')}, {problem.get('data')}, {problem.get('steps')} steps",
        factors=tuple(sorted({factor for by_factor in results.values() for factor in by_factor})),
        results=results,
    )


def _result(cell: Configuration) -> StressResult:
    runs = [Run(row) for row in cell.rows]
    finals = [run.final for run in runs if run.final is not None]
    return StressResult(
        runs=len(runs),
        diverged=sum(1 for run in runs if run.diverged),
        final=sum(finals) / len(finals) if finals else None,
        outcome=cell.outcome,
    )
