"""From records to the table that the attention backend `auto` chooses by: forward and backward seconds of one call.

Attention measured alone counts first. Where there is none, GPT steps that differ in nothing but their attention tell it of
the backends that they ran: the seconds of their attention kernels, over their layers.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from te_bench.kernels.attention import AUTO, Problem, in_fp8, table
from te_bench.kernels.attention.table import Cell
from te_bench.models import cost
from te_bench.models.configs import CONFIGS
from te_bench.reports.analysis import rows
from te_bench.reports.analysis.attention import PASSES
from te_bench.reports.analysis.floor import kind_of
from te_bench.reports.analysis.layers import kernel_seconds
from te_bench.reports.analysis.measures import median, typical
from te_bench.reports.analysis.rows import Group, Results

NOTE = "derived from GPT steps that differ in their attention alone"


class Candidate(NamedTuple):
    """A cell, and what decides between two of one problem: attention alone, more rivals, later."""

    alone: bool
    rivals: int
    started_at: str
    cell: Cell


def of_results(directories: Sequence[Path], environment: str | None = None) -> tuple[Cell, ...]:
    """The cells that the runs' records hold, each from one environment, or all from this one.

    Raises ValueError where they hold none.
    """
    results = rows.load_results(directories)
    best: dict[tuple[str, Problem], Candidate] = {}
    for group in results.groups:
        if environment not in (None, group.environment):
            continue
        for found in (*_alone(results, group), *_of_steps(results, group)):
            known = best.get(found.cell.key)
            if known is None or found[:3] > known[:3]:
                best[found.cell.key] = found
    if not best:
        raise ValueError(
            f"{', '.join(map(str, directories))} holds no timings of attention: measure some with te-bench tune attention"
        )
    return tuple(found.cell for found in best.values())


def _alone(results: Results, group: Group) -> Iterator[Candidate]:
    """Of trials of the workload `attention`."""
    seconds: dict[Problem, dict[str, float]] = {}
    dates: dict[Problem, list[str]] = {}
    for cell in group.of("attention"):
        trial = cell.trial
        forward, backward = (typical(cell.ok, sample) for sample in PASSES)
        if forward is None or backward is None or trial.mode != "eager":
            continue
        if trial.attention == AUTO or in_fp8(trial.attention):
            continue
        problem = table.whole(problem_of(trial.problem, trial.precision, trial.device))
        seconds.setdefault(problem, {})[trial.attention] = forward + backward
        dates.setdefault(problem, []).extend(record.started_at for record in cell.ok)
    for problem, by_name in seconds.items():
        yield _candidate(results, group, problem, by_name, dates[problem], alone=True)


def _of_steps(results: Results, group: Group) -> Iterator[Candidate]:
    """Of trials of the workload `train_step`, where attention is all that tells some of them apart."""
    compared: dict[str, dict[str, float]] = {}
    problems: dict[str, tuple[Problem, list[str]]] = {}
    for cell in group.of("train_step"):
        trial = cell.trial
        config = CONFIGS.get(str(trial.problem.get("model")))
        total = sum(value for name, value in kernel_seconds(cell).items() if kind_of(name) == cost.ATTENTION)
        if config is None or not total or trial.device != "cuda" or trial.problem.get("accumulate", 1) != 1:
            continue
        if in_fp8(trial.attention):
            continue
        asked = {**trial.problem, "heads": config.n_head, "length": trial.problem["block"], "causal": True}
        asked["head_dim"] = config.n_embd // config.n_head
        dtype = "bf16" if trial.precision == "fp8" else trial.precision
        others = json.dumps({**trial.to_json(), "attention": None, "seed": None}, sort_keys=True)
        compared.setdefault(others, {})[trial.attention] = total / config.n_layer
        _, dates = problems.setdefault(others, (table.whole(problem_of(asked, dtype, "cuda")), []))
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
        yield _candidate(results, group, problem, by_name, dates, alone=False)


def problem_of(settings: Mapping[str, Any], dtype: str, device: str) -> Problem:
    """The attention problem of a trial's settings, as workloads/attention.py reads them."""
    window = (settings["window_left"], settings["window_right"]) if "window_left" in settings else None
    return Problem(
        batch=settings["batch"],
        heads=settings["heads"],
        length=settings["length"],
        head_dim=settings["head_dim"],
        dtype=dtype,
        causal=bool(settings["causal"]),
        dropout=float(settings.get("dropout") or 0.0),
        device=device,
        capability=None,
        kv_heads=settings.get("kv_heads"),
        window=window,
    )


def _candidate(
    results: Results, group: Group, problem: Problem, seconds: Mapping[str, float], dates: Iterable[str], *, alone: bool
) -> Candidate:
    known = rows.identity(results.environments[group.environment])
    machine = str(known.get("gpu") or known.get("cpu"))
    latest = max(dates)
    versions = [f"{name} {known[name]}" for name in ("torch", "triton", "cudnn") if known.get(name)]
    words = [f"suite {group.suite}", latest[:10], *versions, *([] if alone else [NOTE])]
    rounded = {name: float(f"{value:.4g}") for name, value in seconds.items()}
    cell = Cell(machine=machine, problem=problem, seconds=rounded, source=", ".join(words))
    return Candidate(alone=alone, rivals=len(seconds), started_at=latest, cell=cell)
