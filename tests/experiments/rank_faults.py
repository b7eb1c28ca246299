"""What becomes of a trial when one of its ranks goes wrong, for test_ranks: python rank_faults.py prints replies as JSON."""

import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from te_bench.experiments import ranks, trial_model
from te_bench.experiments import trial as child
from te_bench.experiments.checks import training_step
from te_bench.experiments.measurement import Context
from te_bench.experiments.spec import Trial
from te_bench.training.parallel import ddp
from te_bench.training.step import Optim, TrainStep

PROBLEM = {"model": "tiny", "block": 16, "vocab": 250, "padded_vocab": 256, "batch": 4, "parallel": "ddp", "world": 2}
TRIAL = Trial(workload="train_step", device="cpu", problem=PROBLEM, attention="manual")


def meet() -> None:
    for _ in range(2):
        dist.all_reduce(torch.ones(1))


def in_a_trial(fault: Callable[[], object]) -> Callable[[Trial, Context], dict[str, Any]]:
    """A trial of one collective, before which each rank does that."""

    def work(trial: Trial, context: Context) -> Any:
        meet()
        fault()
        meet()
        raise AssertionError("no rank comes so far")

    def one(trial: Trial, context: Context) -> dict[str, Any]:
        child.plugins.load = lambda *_: work  # type: ignore[assignment]
        return child.run_one(trial, context)

    return one


def of_rank_1(fault: Callable[[], object]) -> Callable[[Trial, Context], dict[str, Any]]:
    return in_a_trial(lambda: fault() if dist.get_rank() == 1 else None)


def fail() -> None:
    raise ValueError("no such luck")


def not_a_number(trial: Trial, context: Context) -> dict[str, Any]:
    """The step itself, of a model that rank 1 has a NaN in."""
    usual = trial_model.step_of

    def step_of(trial: Trial) -> TrainStep:
        step = usual(trial)
        if dist.get_rank() == 1:
            next(step.model.parameters()).data[:] = torch.nan
        return step

    trial_model.step_of = step_of
    return child.run_one(trial, context)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    time.sleep(600)


def while_rank_0_computes(fault: Callable[[], object]) -> Callable[[Trial, Context], dict[str, Any]]:
    """The fault in rank 1, while rank 0 is busy and does not see it."""

    def of_both() -> None:
        time.sleep(600) if dist.get_rank() == 0 else fault()

    return in_a_trial(of_both)


def late() -> None:
    time.sleep(ranks.PATIENCE_S + 1.5)


def of_nccl() -> None:
    raise dist.DistBackendError("NCCL error in: init.cpp:1, invalid usage. Duplicate GPU detected : rank 1 and rank 0")


def waits_by_nccl() -> None:
    """What NCCL's watchdog does in a rank that has waited for long enough."""
    os.write(2, b"[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE)\n")
    os.abort()


class Experts(torch.nn.Module):
    """Each rank's rows reach an expert of their own, from the given step on."""

    def __init__(self, since: int):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.since, self.calls = since, 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.experts[dist.get_rank() if self.calls > self.since else 0](x) - y).square().mean()


def other_experts(since: int) -> Callable[[], object]:
    def steps() -> None:
        step = TrainStep(Experts(since), Optim(), precision="fp32", mode="eager", parallel=ddp.DDP())
        for _ in range(3):
            step(torch.ones(2, 4), torch.zeros(2, 4))

    return steps


def slow_reference(trial: Trial, context: Context) -> dict[str, Any]:
    """The step, whose reference takes rank 1 longer than collectives wait."""
    usual = training_step.reference

    def reference(*args: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(ranks.PATIENCE_S)
        return usual(*args)

    training_step.reference = reference
    return child.run_one(trial, context)


def compiled() -> dict[str, Any]:
    """A step in FP8 whose blocks FSDP2 gathers between what is compiled: more layers than one function is compiled for."""
    problem = {**PROBLEM, "parallel": "fsdp2", "layers": 10, "block": 8}
    asked = dataclasses.replace(TRIAL, problem=problem, precision="fp8", recipe="delayed_scaling", mode="compile")
    return child.run(asked, Context())


if __name__ == "__main__" and sys.argv[1:] == ["compiled"]:
    print(json.dumps(compiled()))
elif __name__ == "__main__":
    ranks.PATIENCE_S = 4.0
    slow = {"slow reference": ranks.run(TRIAL, Context(), slow_reference)}
    replies = {fault.__name__: ranks.run(TRIAL, Context(), of_rank_1(fault)) for fault in (killed, hangs, late, fail)}
    for fault in (os.abort, of_nccl, waits_by_nccl):
        with tempfile.TemporaryFile() as log:
            os.dup2(log.fileno(), 2)
            replies[fault.__name__] = ranks.run(TRIAL, Context(), while_rank_0_computes(fault))
    for since in (0, 1):
        replies[f"other experts, {since=}"] = ranks.run(TRIAL, Context(), in_a_trial(other_experts(since)))
    for check in (True, False):
        replies[f"not a number, {check=}"] = ranks.run(TRIAL, Context(check=check), not_a_number)
    print(json.dumps(replies | slow))
