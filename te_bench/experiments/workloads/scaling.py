"""A training step as `train_step` measures it, on one GPU or over several, and what it takes of each: for the suite scaling.

work has besides: ranks, of each rank its memory (instruments.ledger), and on GPUs what it does in a step's time
(instruments.communication), unless GEMMs overlap with collectives by symmetric memory; interconnect, the measured bandwidth
between several. On a CPU each process computes in one thread.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments.instruments import communication, ledger
from te_bench.experiments.measurement import Context, Measurement
from te_bench.experiments.problems import backend_of
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import train_step
from te_bench.training.step import TrainStep


def run(trial: Trial, context: Context) -> Measurement:
    if trial.device == "cpu":  # one process has what each of two has, as one GPU has
        torch.set_num_threads(1)
    return train_step.measured(trial, context, functools.partial(_of_ranks, trial))


def _of_ranks(
    trial: Trial,
    step: TrainStep,
    next_step: Callable[[], None],
    batch: tuple[Tensor, Tensor],
    samples: dict[str, list[float]],
) -> dict[str, Any]:
    """Every rank calls it at once, and all make as many steps."""
    parallel = step.parallel
    own: dict[str, Any] = {}
    found: dict[str, Any] = {}
    if not parallel.overlapped(1):  # the trace tells no copy between GPUs from the waits around it
        own |= communication.of_steps(next_step, trial.device, parallel.of_all)
    if parallel.world > 1 and (link := communication.bandwidth(trial.device, parallel.of_all)):
        found["interconnect"] = {"backend": backend_of(trial), **link}
    peak = samples.get("peak_allocated_bytes")
    own["memory"] = {
        **ledger.of_step(trial, step, *map(parallel.rows, batch)),
        **({"peak": peak[0]} if peak else {}),
    }
    return {**found, "ranks": parallel.of_all(own)}
