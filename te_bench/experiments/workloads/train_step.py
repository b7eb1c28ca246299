"""Seconds and bytes of one training step at a fixed batch, on random tokens, once its gradients have been checked.

samples: latency_s (20), loss (30), peak_*_bytes (1), on GPUs that count it energy_j (1), of all ranks.
work: tokens and FLOP of one step; ran, how often each part of it did (checks.what_ran); FP8 numerics; on a GPU launches, the
kernels of one step, and kernel_s, {kernel: seconds a step}; in a mode that compiles graph_breaks and recompiles; over
several ranks world, parallel, backend and, of a step that no graph replays, its collectives (instruments.collectives).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments import timing, trial_model
from te_bench.experiments.checks import gathers, held, training_step, update, what_ran, windows
from te_bench.experiments.checks.quantity import CHECKED_BEFORE
from te_bench.experiments.checks.timed import Timed
from te_bench.experiments.instruments import collectives, compilation, energy, fp8_numerics, memory, profiling
from te_bench.experiments.measurement import Context, Diverged, Measurement
from te_bench.experiments.problems import TrainStepProblem, ranks_of, world_of
from te_bench.experiments.spec import Trial
from te_bench.training.parallel import SINGLE
from te_bench.training.step import TrainStep

BATCHES = 4  # different batches, in turn: data loading is not what this workload measures


#: Another workload reads this off the timed step: (step, next_step, a batch, samples) -> more of work.
More = Callable[[TrainStep, Callable[[], None], tuple[Tensor, Tensor], dict[str, list[float]]], dict[str, Any]]


def run(trial: Trial, context: Context) -> Measurement:
    return measured(trial, context)


def measured(trial: Trial, context: Context, more: More = lambda *_: {}) -> Measurement:
    p = TrainStepProblem.of(trial)
    trial_model.require_supported(trial)
    compilation.begin(trial)
    batches = random_batches(trial)
    if (plan := windows.plan_of(trial)) is not None:
        for number, batch in enumerate(batches):
            plan.require(number, int(windows.digest(*batch)))
    step, check = (
        training_step.begin(trial, *batches[0]) if context.check else (trial_model.step_of(trial), CHECKED_BEFORE)
    )
    if step.parallel.world > 1:  # the check's references began again with one process's seed
        torch.manual_seed(step.parallel.seed(trial.seed))
    asked = context.check and step.parallel is SINGLE
    told = training_step.foretold(trial, step, lambda: batches[0]) if asked else None
    losses: list[Tensor] = []

    def next_step() -> None:
        losses.append(step(*batches[len(losses) % BATCHES]))

    memory.reset(trial.device)
    timed = Timed(next_step)
    with update.made(step, lambda: timed.calls):
        latency = timed.samples(timing.bench_py, trial.device)
    peaks = memory.peak(trial.device, step)
    held.require(peaks, held.of_step(step, batches[0]))
    loss = torch.stack(losses).tolist()
    tokens = p.batch * p.block * step.optim.accumulate
    flop = tokens * step.model.flop_per_token(p.block)  # type: ignore[operator]
    work = {"tokens": tokens, "flop": flop, **ranks_of(trial), **compilation.counts(trial)}
    measurement = Measurement(check=check, work=work, samples={"latency_s": latency, "loss": loss, **peaks})
    if not all(abs(x) < float("inf") for x in loss):
        raise Diverged("the loss is not finite", Measurement(check=check, work=work))
    if not context.check:  # a gate's later rounds need times and memory alone
        return measurement
    training_step.require_foretold(0, loss[0], told)
    measurement = what_ran.require_step(trial, step, next_step, tokens, measurement)
    # A CPU's operators are no kernels that a floor could be given for.
    profile = {"kernel_s": profiling.kernel_seconds(next_step, trial.device)} if trial.device == "cuda" else {}
    read = more(step, next_step, batches[0], {"latency_s": latency, **peaks})
    numerics = fp8_numerics.of_a_pass(trial, step, *map(step.parallel.rows, batches[0]))
    sent = _collectives(trial, next_step)
    joules = energy.sample(next_step, trial.device, latency, step.parallel)
    work = {**measurement.work, **profile, **read, **numerics, **sent}
    measurement = dataclasses.replace(measurement, work=work, samples={**measurement.samples, **joules})
    if told is not None:
        told = training_step.foretold(trial, step, lambda: batches[len(losses) % BATCHES])
        next_step()
        training_step.require_foretold(len(losses) - 1, losses[-1].item(), told)
    gathers.require(trial, step, sent.get("collectives"), measurement)
    return measurement


def _collectives(trial: Trial, next_step: Callable[[], None]) -> dict[str, Any]:
    """Return the collectives of a step over several ranks that no graph replays."""
    if world_of(trial) == 1 or trial.mode not in gathers.SEEN:
        return {}
    seen = collectives.of_call(next_step)
    return {} if seen is None else {"collectives": seen}


def random_batches(trial: Trial) -> list[tuple[Tensor, Tensor]]:
    """Return (inputs, targets) on the device: tokens uniform over the true vocabulary, or what a user's model takes."""
    return list(map(trial_model.batches_of(trial), range(BATCHES)))
