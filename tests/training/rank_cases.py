"""What N ranks compute beside one process, for test_parallel: python rank_cases.py WORLD prints what was found, as JSON.

In a process of its own, which forks its ranks before it has computed anything.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_bench.experiments import ranks
from te_bench.experiments.instruments import collectives
from te_bench.experiments.measurement import Context
from te_bench.experiments.problems import world_of
from te_bench.experiments.spec import Trial
from te_bench.models.recipe import DelayedScaling
from te_bench.models.zoo.gpt import GPT, GPTConfig
from te_bench.training import checkpoints, parallel
from te_bench.training.data import Batches
from te_bench.training.parallel import SINGLE, Parallel, ddp
from te_bench.training.step import Optim, TrainStep

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)
OPTIM = Optim(learning_rate=1e-2, grad_clip=0.5)
STEPS, ROWS = 50, 8


def a_step(divided: Parallel, precision: str, *, seed: int = 0, optimizer: str | None = None, **more: Any) -> TrainStep:
    torch.manual_seed(seed)
    recipe = DelayedScaling(amax_history_len=2) if precision == "fp8" else None
    blocks = "fused" if optimizer else None
    model: Any = GPT(SMALL, attention="manual", padded_vocab_size=64, recipe=recipe, blocks=blocks)
    optim = dataclasses.replace(OPTIM, **more)
    model = model.double() if precision == "fp64" else model
    return TrainStep(model, optim, precision=precision, mode="eager", optimizer=optimizer, parallel=divided)


def batch(step: int) -> tuple[Tensor, Tensor]:
    return Batches(None, block=16, batch=ROWS, vocab=50, seed=7).at(step)


def losses(step: TrainStep, steps: int = STEPS) -> list[float]:
    return [step(*batch(number)).item() for number in range(steps)]


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest error of any tensor, of its largest element."""
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs)


def beside_one(mode: str, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for accumulate in (1, 2):
        # Whatever a rank begins with, rank 0's weights are what all train.
        ours = a_step(parallel.load(mode), "fp64", seed=dist.get_rank(), accumulate=accumulate)
        one = a_step(SINGLE, "fp64", accumulate=accumulate)
        loss, gradients = ours.gradients(*batch(0))
        expected, truth = one.gradients(*batch(0))
        assert ours.grad_norm is not None
        assert one.grad_norm is not None
        found[f"accumulate {accumulate}"] = {
            "loss": abs(loss / expected - 1),
            "gradients": apart(gradients, truth),
            "norm": abs(ours.grad_norm.item() / one.grad_norm.item() - 1),
        }
    ours, slices = a_step(parallel.load(mode), "fp64"), a_step(SINGLE, "fp64", accumulate=world)
    found["losses"] = [losses(ours), losses(slices)]
    found["weights"] = apart(
        {name: ours.parallel.whole(p.detach()) for name, p in ours.model.named_parameters()},
        {name: p.detach() for name, p in slices.model.named_parameters()},
    )
    found["collectives"] = collectives.of_call(lambda: ours(*batch(0)))
    parameters = dict(slices.model.named_parameters())
    found["bytes"] = sum(p.nbytes for p in parameters.values())
    found["vector_bytes"] = sum(p.nbytes for p in parameters.values() if p.dim() < 2)
    found["table_bytes"] = sum(
        p.nbytes for name, p in parameters.items() if name.endswith(("wte.weight", "wpe.weight"))
    )
    found["saved"] = saved(ours)
    return found


def saved(step: TrainStep) -> bool:
    """Whether what rank 0 writes is the weights that all have together; on the way no rank waits for another in vain."""
    model: Any = step.model
    weights = {name: step.parallel.whole(p.detach()) for name, p in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        checkpoints.save(model, path, parallel=step.parallel)
        if step.parallel.rank:
            return not path.exists()
        read = checkpoints.load(path)
        return all(torch.equal(read.parameters[name], weights[name][: len(read.parameters[name])]) for name in weights)


def in_small_buckets(optimizer: str | None) -> dict[str, Any]:
    """A step whose buckets are small: how many were sent while the backward pass went on, and after it; and its error."""
    usual, ddp.BUCKET_BYTES = ddp.BUCKET_BYTES, 2**12
    seen = {"during": 0, "after": 0}
    send = dist.all_reduce

    def all_reduce(*args: Any, **said: Any) -> Any:
        seen["after" if torch._C._current_graph_task_id() == -1 else "during"] += 1  # type: ignore[attr-defined]
        return send(*args, **said)

    ours, one = (a_step(each, "bf16", optimizer=optimizer) for each in (parallel.load("ddp"), SINGLE))
    ours.gradients(*batch(0))  # the first pass plans the buckets
    dist.all_reduce = all_reduce
    try:
        _, gradients = ours.gradients(*batch(0))
    finally:
        dist.all_reduce, ddp.BUCKET_BYTES = send, usual
    return {**seen, "error": apart(gradients, one.gradients(*batch(0))[1])}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(part(x).tanh() for part in self.parts)


class Nested(nn.Module):
    """Lists of lists of blocks that have lists of their own, and a part that is no multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]
                x = block(x)
        return (x - y).square().mean()


def nested(mode: str) -> float:
    """The largest error of a gradient of a user's model, whose blocks lie in lists of lists."""
    steps = []
    for divided in (parallel.load(mode), SINGLE):
        torch.manual_seed(0)
        steps.append(TrainStep(Nested().double(), OPTIM, precision="fp64", mode="eager", parallel=divided))
    x, y = torch.randn(2, ROWS, 8, dtype=torch.float64)
    return apart(*(step.gradients(x, y)[1] for step in steps))


def in_fp8(mode: str, optimizer: str | None) -> dict[str, Any]:
    """Scales and weights after some steps of delayed scaling: in every rank the same."""
    step = a_step(parallel.load(mode), "fp8", optimizer=optimizer)
    course = losses(step, 6)
    scales = [t.float() for name, t in step.model.state_dict().items() if "fp8" in name and "scale" in name]
    weights = [step.parallel.whole(p.detach()) for p in step.model.parameters()]
    mine = torch.cat([t.flatten() for t in (*scales, *weights)])
    rank_0 = mine.clone()
    dist.broadcast(rank_0, src=0)
    return {
        "losses": course,
        "one": losses(a_step(SINGLE, "fp8"), 6),
        "alike": torch.equal(mine, rank_0),
        "scales": len(scales),
    }


def cases(trial: Trial, context: Context) -> dict[str, Any]:
    world = world_of(trial)
    found: dict[str, Any] = {mode: beside_one(mode, world) for mode in parallel.names()}
    found["nested"] = {mode: nested(mode) for mode in parallel.names()}
    seeds = torch.tensor([parallel.load("ddp").seed(seed) for seed in range(3)])
    each = [torch.empty_like(seeds) for _ in range(world)]
    dist.all_gather(each, seeds)
    found["seeds"] = torch.cat(each).tolist()
    found["buckets"] = {str(optimizer): in_small_buckets(optimizer) for optimizer in (None, "reference")}
    found["fp8"] = {"ddp": in_fp8("ddp", "reference"), "fsdp2": in_fp8("fsdp2", None)}
    return {"outcome": "ok", "reason": None, "samples": {}, "found": found}


if __name__ == "__main__":
    problem = {"model": "tiny", "block": 16, "vocab": 50, "padded_vocab": 64, "batch": ROWS}
    problem |= {"parallel": "ddp", "world": int(sys.argv[1])}
    asked = Trial(workload="train_step", device="cpu", problem=problem, attention="manual")
    print(json.dumps(ranks.run(asked, Context(), cases)))
