"""What becomes of a trial when one of its ranks goes wrong, for test_ranks: python rank_faults.py prints replies as JSON.

python rank_faults.py compiled: those of steps that are compiled.
"""

import dataclasses
import functools
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, ClassVar

import engine_by_te
import torch
import torch.distributed as dist

from te_bench.experiments import ranks, timing, trial_model
from te_bench.experiments import trial as child
from te_bench.experiments.checks import training_step
from te_bench.experiments.measurement import Context, Unsupported
from te_bench.experiments.processes import ProcessCall, wait_for_any
from te_bench.experiments.spec import Trial
from te_bench.kernels.quantize import Operand
from te_bench.models.modules.tensor_parallel import Ranks
from te_bench.models.sources import Source
from te_bench.training.parallel import ddp, fsdp2, tp
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


def throttled(trial: Trial, context: Context) -> dict[str, Any]:
    """The reply of ranks whose GPUs are slowed down for different reasons."""
    rank = dist.get_rank()
    state = {"uuid": f"GPU-{rank}", "throttle_reasons": (1, 32)[rank], "lowest_sm_clock_hz": (1.98e9, 1.2e9)[rank]}
    return {"outcome": "ok", "samples": {}, "device_state": state}


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


def cannot() -> None:
    """Neither rank can, and rank 0 finds out when rank 1 has long said so."""
    if dist.get_rank() == 0:
        time.sleep(ranks.GRACE_S + 2)
    raise Unsupported("no such GPU")


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


class Pair(torch.nn.Module):
    tp_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x)) - y).square().mean()


def other_batches(mode: str, what: str) -> Callable[[], object]:
    """Rank 1 is given half as many rows as rank 0, or as many others."""

    def steps() -> None:
        divided = {"ddp": ddp.DDP, "tp": tp.TP}[mode]()
        step = TrainStep(Pair(), Optim(), precision="fp32", mode="eager", parallel=divided)
        rank = dist.get_rank()
        step(*(torch.ones(2, 4 - 2 * rank, 4) if what == "shapes" else torch.full((2, 4, 4), float(rank))))

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


def gathers_bf16(trial: Trial, context: Context) -> dict[str, Any]:
    """A step that is asked for a gather in FP8, and forgets it."""

    class Forgets(fsdp2.FSDP2):
        def __init__(self, gather: str) -> None:
            super().__init__()

    fsdp2.PARALLEL = Forgets  # type: ignore[misc]
    return child.run_one(trial, context)


def sends_float32(trial: Trial, context: Context) -> dict[str, Any]:
    """Sequence parallelism whose forward pass sends the same numbers in float32, and whose backward pass sends FP8."""
    in_fp8 = Ranks.gather_operand

    def gather_operand(self: Ranks, own: Operand) -> Operand:
        if torch._C._current_graph_task_id() != -1:
            return in_fp8(self, own)
        return own._replace(data=self.gather(own.data.to(torch.float32)).to(own.data.dtype))

    Ranks.gather_operand = gather_operand  # type: ignore[method-assign]
    return child.run_one(trial, context)


def by_engine(trial: Trial, context: Context) -> dict[str, Any]:
    """A trial of Transformer Engine's layers, by a stand-in."""
    engine_by_te.plant()
    return child.run_one(trial, context)


def engine_in_bf16(trial: Trial, context: Context) -> dict[str, Any]:
    """One whose layers gather in high precision, as Transformer Engine's do of what they cannot quantise."""
    Ranks.gather_operand = lambda self, own: own._replace(  # type: ignore[method-assign]
        data=self.gather(own.data.to(torch.bfloat16)).to(own.data.dtype)
    )
    return by_engine(trial, context)


def traced(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend of torch.compile's that makes no code of a graph, which takes Inductor most of the time.

    What the graph keeps of operators that write to their arguments are calls into which a dispatch mode cannot look.
    """

    def plain(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        decompose_auto_functionalized(graph.graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=plain, partition_fn=min_cut_rematerialization_partition)(graph, inputs)


def compiled() -> dict[str, Any]:
    """Steps whose ranks are forked where torch.compile is imported already."""
    torch.compile = functools.partial(torch.compile, backend=traced)
    asked = {}
    # torchtitan's step of a Llama, whose blocks are compiled between what DTensor sends.
    theirs = {**PROBLEM, "model": "llama-tiny", "rival": "torchtitan", "parallel": "tp"}
    asked["theirs"] = dataclasses.replace(TRIAL, problem=theirs, mode="compile")
    # A Llama's in FP8, whose layers, vocabulary and tokens ranks share: one graph with its collectives.
    in_fp8 = dataclasses.replace(TRIAL, precision="fp8", recipe="delayed_scaling", mode="compile")
    tokens = {**PROBLEM, "model": "llama-tiny", "layers": 1, "parallel": "tp", "sequence_parallel": True}
    asked["tokens"] = dataclasses.replace(in_fp8, problem=tokens)
    found = {name: child.run(trial, Context()) for name, trial in asked.items()}
    # One in FP8 whose blocks FSDP2 gathers between what is compiled: more layers than one function is compiled for.
    torch._dynamo.config.recompile_limit = 1  # of its own accord 8
    blocks = {**PROBLEM, "parallel": "fsdp2", "layers": 2, "block": 8}
    return found | {"blocks": child.run(dataclasses.replace(in_fp8, problem=blocks), Context())}


def of_ranks(one: Callable[[Trial, Context], dict[str, Any]], check: bool = True) -> Callable[[], dict[str, Any]]:
    return functools.partial(ranks.run, TRIAL, Context(check=check), one)


def logged(fault: Callable[[], object]) -> dict[str, Any]:
    """The reply where the trial has a log of its own, as in a sweep."""
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        return of_ranks(while_rank_0_computes(fault))()


def replies() -> dict[str, Any]:
    """Those of trials that wait for most of their time are had all at once, in forks, the others meanwhile."""
    wait = {"slow reference": of_ranks(slow_reference)}
    wait |= {fault.__name__: of_ranks(of_rank_1(fault)) for fault in (hangs, late)}
    wait |= {cannot.__name__: of_ranks(in_a_trial(cannot))}
    wait |= {fault.__name__: functools.partial(logged, fault) for fault in (os.abort, of_nccl, waits_by_nccl)}
    fork = multiprocessing.get_context("fork")
    calls = {name: ProcessCall(fork, ask) for name, ask in wait.items()}
    for call in calls.values():
        call.start()
    compute = {fault.__name__: of_ranks(of_rank_1(fault)) for fault in (killed, fail)}
    compute |= {throttled.__name__: of_ranks(throttled)}
    compute |= {f"other experts, {since=}": of_ranks(in_a_trial(other_experts(since))) for since in (0, 1)}
    compute |= {
        f"other {what}, {mode=}": of_ranks(in_a_trial(other_batches(mode, what)))
        for mode, what in (("ddp", "contents"), ("tp", "shapes"))
    }
    compute |= {f"not a number, {check=}": of_ranks(not_a_number, check) for check in (True, False)}
    found = {name: ask() for name, ask in compute.items()}
    while not all(call.ended for call in calls.values()):
        wait_for_any([call for call in calls.values() if not call.ended])
    return found | {name: call.result() for name, call in calls.items()}


def of_experts() -> dict[str, Any]:
    """A Mixtral's step, of which rounding sends a token of one rank elsewhere than float64 does."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = json.dumps({"model_type": "mixtral", **sizes, **heads, "num_hidden_layers": 2})
    source = Source(model="hf:mixtral", config=config).settings
    problem = {**source, "block": 16, "vocab": 64, "padded_vocab": 64, "batch": 8, "parallel": "ddp", "world": 2}
    trial = dataclasses.replace(TRIAL, attention="own", precision="bf16", seed=7, problem=problem)
    return ranks.run(trial, Context(), child.run_one)


def of_gathers() -> dict[str, Any]:
    asked = {"problem": {**PROBLEM, "parallel": "fsdp2", "gather": "fp8", "layers": 1, "block": 8}, "precision": "fp8"}
    in_fp8 = dataclasses.replace(TRIAL, **asked, recipe="float8_current_scaling")
    by_rows = dataclasses.replace(in_fp8, recipe="rowwise_scaling")
    shared = {name: value for name, value in asked["problem"].items() if name != "gather"}  # type: ignore[attr-defined]
    of_tokens = dataclasses.replace(in_fp8, problem={**shared, "parallel": "tp", "sequence_parallel": True})
    of_engine = {**shared, "model": "llama-tiny", "rival": "transformer_engine_current"}
    sharded, divided = (
        dataclasses.replace(in_fp8, attention="flash", problem={**of_engine, "parallel": mode})
        for mode in ("fsdp2", "tp")
    )
    return {
        "engine fsdp2": ranks.run(sharded, Context(), by_engine),
        "engine tp": ranks.run(divided, Context(), by_engine),
        "engine bf16": ranks.run(divided, Context(), engine_in_bf16),
        "experts": of_experts(),
        "tokens float32": ranks.run(of_tokens, Context(), sends_float32),
        "tokens fp8": ranks.run(of_tokens, Context(), child.run_one),
        "gathers bf16": ranks.run(in_fp8, Context(), gathers_bf16),
        "gathers fp8": ranks.run(in_fp8, Context(), child.run_one),
        "gathers rows": ranks.run(by_rows, Context(), child.run_one),
    }


if __name__ == "__main__" and sys.argv[1:]:
    import networkx  # noqa: F401  # once for all ranks, as what follows
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized

    gc.freeze()
    print(json.dumps(compiled()))
elif __name__ == "__main__":
    once = ("torch._inductor", "torch.distributed.optim", "te_bench.training.parallel.fsdp2_tp")
    for name in (*once, "transformers.models.mixtral.modeling_mixtral"):
        importlib.import_module(name)  # once for all ranks
    gc.freeze()  # ranks look for garbage with each model: not among what is imported
    timing.BENCH_PY_BURN_IN, timing.BENCH_PY_TIMED = 1, 2  # nothing here is of how long a step takes
    ranks.PATIENCE_S = 4.0
    found = replies()
    ranks.PATIENCE_S = 45.0
    print(json.dumps(found | of_gathers()))
