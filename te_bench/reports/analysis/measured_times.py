"""Turn records into the table of measured times: seconds of one call, forward and backward together, by backend.

Kernels measured alone come first. Without them, GPT steps that differ only in their attention give the time of the backends
that they ran: the seconds of their attention kernels over the number of their layers.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from te_bench.experiments.problems import AttentionProblem
from te_bench.experiments.spec import Trial
from te_bench.experiments.tuning import KINDS, SETTINGS
from te_bench.kernels.attention import AUTO, Problem, in_fp8
from te_bench.kernels.attention.table import whole
from te_bench.kernels.gemm import table as gemm
from te_bench.kernels.linear_cross_entropy import table as linear_cross_entropy
from te_bench.kernels.measured import Timing
from te_bench.models import cost
from te_bench.models.configs import configs
from te_bench.reports.analysis import rows
from te_bench.reports.analysis.attention import PASSES
from te_bench.reports.analysis.floor import kind_of
from te_bench.reports.analysis.layers import kernel_seconds
from te_bench.reports.analysis.measures import median, typical
from te_bench.reports.analysis.rows import Configuration, Group, Results

NOTE = "derived from GPT steps that differ in their attention alone"
#: {operator, also the workload's name: the samples of a call}.
SAMPLES = {"attention": PASSES, "gemm": ("kernel_s",), "linear_cross_entropy": ("kernel_s",)}


class Candidate(NamedTuple):
    """A row, and what decides between rows of one problem: measured alone, then more backends, then later."""

    alone: bool
    backends: int
    started_at: str
    timing: Timing


def of_results(kind: str, directories: Sequence[Path], environment: str | None = None) -> tuple[Timing, ...]:
    """Return the rows of `te-bench tune KIND` from runs' records, each from one environment, or all from `environment`.

    Raises ValueError if the records hold none.
    """
    results = rows.load_results(directories)
    tuned = KINDS[kind]
    best: dict[tuple[str, str, Any], Candidate] = {}
    for group in results.groups:
        if environment not in (None, group.environment):
            continue
        of_steps = _of_steps(results, group) if kind == "attention" else ()
        for found in (*_alone(tuned.operator, results, group), *of_steps):
            known = best.get(found.timing.key)
            if tuned.holds(found.timing.problem) and (known is None or found[:3] > known[:3]):
                best[found.timing.key] = found
    if not best:
        where = ", ".join(map(str, directories))
        raise ValueError(f"{where} holds no timings of {kind}: measure some with te-bench tune {kind}")
    return tuple(found.timing for found in best.values())


def _alone(operator: str, results: Results, group: Group) -> Iterator[Candidate]:
    """Yield rows from trials of the operator's workload."""
    seconds: dict[Any, dict[str, float]] = {}
    dates: dict[Any, list[str]] = {}
    for cell in group.of(operator):
        total = _seconds(cell, SAMPLES[operator])
        backend = backend_of(cell.trial)
        if total is None or cell.trial.mode != "eager" or backend == AUTO or in_fp8(backend):
            continue
        problem = problem_of(cell.trial)
        seconds.setdefault(problem, {})[backend] = total
        dates.setdefault(problem, []).extend(record.started_at for record in cell.ok)
    for problem, by_name in seconds.items():
        yield _found(operator, results, group, problem, by_name, dates[problem], alone=True)


def _seconds(cell: Configuration, samples: Iterable[str]) -> float | None:
    """Return the sum of the samples' medians; None if one is missing."""
    found = [typical(cell.ok, sample) for sample in samples]
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None


def _of_steps(results: Results, group: Group) -> Iterator[Candidate]:
    """Yield rows from `train_step` trials that differ only in their attention."""
    compared: dict[str, dict[str, float]] = {}
    problems: dict[str, tuple[Problem, list[str]]] = {}
    for cell in group.of("train_step"):
        trial = cell.trial
        config = configs().get(str(trial.problem.get("model")))
        total = sum(value for name, value in kernel_seconds(cell).items() if kind_of(name) == cost.ATTENTION)
        if config is None or not total or trial.device != "cuda" or trial.problem.get("accumulate", 1) != 1:
            continue
        if in_fp8(trial.attention):
            continue
        shape = config.shape
        settings: Mapping[str, Any] = trial.problem
        asked = AttentionProblem(
            batch=settings["batch"],
            heads=shape.heads,
            length=settings["block"],
            head_dim=shape.head_dim,
            causal=True,
            kv_heads=shape.groups,
            dropout=settings.get("dropout") or 0.0,
        )
        dtype = "bf16" if trial.precision == "fp8" else trial.precision
        others = json.dumps({**trial.to_json(), "attention": None, "seed": None}, sort_keys=True)
        compared.setdefault(others, {})[trial.attention] = total / shape.layers
        _, dates = problems.setdefault(others, (whole(asked.posed(dtype, "cuda")), []))
        dates += [record.started_at for record in cell.ok]
    for problem in dict.fromkeys(problem for problem, _ in problems.values()):
        here = [key for key, (of, _) in problems.items() if of == problem and len(compared[key]) > 1]
        if not here:
            continue
        names = compared[max(here, key=lambda key: len(compared[key]))].keys()
        here = [key for key in here if compared[key].keys() == names]
        medians = {name: median([compared[key][name] for key in here]) for name in names}
        by_name = {name: value for name, value in medians.items() if value is not None}
        dates = [date for key in here for date in problems[key][1]]
        yield _found("attention", results, group, problem, by_name, dates, alone=False)


def backend_of(trial: Trial) -> str:
    """Return the backend that a trial of an operator measures."""
    setting = SETTINGS.get(trial.workload)
    return trial.attention if setting is None else str(trial.problem[setting])


def problem_of(trial: Trial) -> Any:
    """Return the problem that a trial of an operator measures, as in the operator's table."""
    settings = {name: value for name, value in trial.problem.items() if name != SETTINGS.get(trial.workload)}
    if trial.workload == "gemm":
        return gemm.read_problem(settings)
    if trial.workload == "linear_cross_entropy":
        return linear_cross_entropy.read_problem({**settings, "dtype": trial.precision})
    return whole(AttentionProblem.of(trial).posed(trial.precision, trial.device))


def _found(
    operator: str,
    results: Results,
    group: Group,
    problem: Any,
    seconds: Mapping[str, float],
    dates: Iterable[str],
    *,
    alone: bool,
) -> Candidate:
    known = rows.identity(results.environments[group.environment])
    machine = str(known.get("gpu") or known.get("cpu"))
    latest = max(dates)
    versions = [f"{name} {known[name]}" for name in ("torch", "triton", "cudnn") if known.get(name)]
    source = ", ".join([f"suite {group.suite}", latest[:10], *versions, *([] if alone else [NOTE])])
    rounded = {name: float(f"{value:.4g}") for name, value in seconds.items()}
    timing = Timing(operator=operator, machine=machine, problem=problem, seconds=rounded, source=source)
    return Candidate(alone=alone, backends=len(seconds), started_at=latest, timing=timing)
