"""What N ranks compute beside one process, for test_parallel: python rank_cases.py CASES... prints what was found, as JSON.

Cases are 2 or 4, of so many ranks; and groups, of four ranks in two groups.

In a process of its own, which forks its ranks before it has computed anything.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_bench.models as te
from te_bench.experiments import ranks
from te_bench.experiments.instruments import collectives
from te_bench.experiments.measurement import Context
from te_bench.experiments.problems import world_of
from te_bench.experiments.spec import Trial
from te_bench.kernels.linear_cross_entropy import kernels, tied
from te_bench.kernels.quantize.backends.reference import dequantize
from te_bench.models import decoder, rivals
from te_bench.models.adopt import adopt
from te_bench.models.configs import LlamaConfig
from te_bench.models.modules.linear import Linear
from te_bench.models.recipe import DelayedScaling, Float8CurrentScaling, Recipe, Slot
from te_bench.models.zoo.gpt import GPT, GPTConfig
from te_bench.training import checkpoints, parallel, ways
from te_bench.training.data import Batches
from te_bench.training.parallel import SINGLE, Parallel, ddp
from te_bench.training.step import Optim, TrainStep

SMALL = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=50)
LLAMA: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
LLAMA |= {"num_key_value_heads": 4, "head_dim": 8, "block_size": 16, "vocab_size": 50}
DECODERS = {"llama": LlamaConfig(**LLAMA), "qwen 3": LlamaConfig(**LLAMA, qk_norm=True)}
ODD = dataclasses.replace(DECODERS["llama"], num_key_value_heads=1)
BIASED = dataclasses.replace(SMALL, bias=True)
REFUSED = [
    dataclasses.replace(SMALL, n_head=1),
    dataclasses.replace(SMALL, dropout=0.1),
]
OPTIM = Optim(learning_rate=1e-2, grad_clip=0.5)
UNCLIPPED = dataclasses.replace(OPTIM, grad_clip=0.0)
STEPS, FP8_STEPS = 6, 4
ROWS = 8
RECIPES: dict[str, Recipe] = {"delayed": DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling()}
MODES = [name for name in parallel.names() if name not in parallel.GROUPED]


def a_step(
    divided: Parallel,
    precision: str,
    *,
    seed: int = 0,
    optimizer: str | None = None,
    recipe: Recipe | None = None,
    padded: int = 64,
    **more: Any,
) -> TrainStep:
    torch.manual_seed(seed)
    recipe = (recipe or RECIPES["delayed"]) if precision == "fp8" else None
    blocks = "fused" if optimizer else None
    model: Any = GPT(SMALL, attention="manual", padded_vocab_size=padded, recipe=recipe, blocks=blocks)
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


@functools.cache
def one_process(slices: int) -> tuple[TrainStep, list[float]]:
    """A step that accumulates over so many slices of the batch, after its course; every mode is held to it."""
    step = a_step(SINGLE, "fp64", accumulate=slices)
    return step, losses(step)


@functools.cache
def first_of_one(accumulate: int) -> tuple[float, dict[str, Tensor], float]:
    """Loss, gradients and norm of one process's first step; every mode is held to them."""
    one = a_step(SINGLE, "fp64", accumulate=accumulate)
    loss, gradients = one.gradients(*batch(0))
    assert one.grad_norm is not None
    return loss, gradients, one.grad_norm.item()


@functools.cache
def fp8_of_one(recipe: str, accumulate: int = 1) -> list[float]:
    """The losses of one process's steps in FP8."""
    return losses(a_step(SINGLE, "fp8", recipe=RECIPES[recipe], accumulate=accumulate), FP8_STEPS)


def beside_one(mode: str, world: int, **options: Any) -> dict[str, Any]:
    """Beside one process, in rank 0, whose findings are read: the others compute no truth for it."""
    found: dict[str, Any] = {}
    for accumulate in (2, 1):
        # Whatever a rank begins with, rank 0's weights are what all train.
        ours = a_step(parallel.load(mode, **options), "fp64", seed=dist.get_rank(), accumulate=accumulate)
        loss, gradients = ours.gradients(*batch(0))
        assert ours.grad_norm is not None
        if dist.get_rank() == 0:
            expected, truth, norm = first_of_one(accumulate)
            found[f"accumulate {accumulate}"] = {
                "loss": abs(loss / expected - 1),
                "gradients": apart(gradients, truth),
                "norm": abs(ours.grad_norm.item() / norm - 1),
            }
    course = losses(ours)
    weights = {name: ours.parallel.whole(p.detach(), p).clone() for name, p in ours.model.named_parameters()}
    found["collectives"] = collectives.of_call(lambda: ours(*batch(0)))
    states = ours.own_optimizer.state.values()
    elements = torch.tensor(sum(value.numel() for state in states for value in state.values() if value.dim()))
    each = [torch.empty_like(elements) for _ in range(world)]
    dist.all_gather(each, elements)
    found["moments"] = [one.item() for one in each]
    found["saved"] = saved(ours)
    return {**found, **course_of_one(ours, course, weights)} if dist.get_rank() == 0 else found


def course_of_one(ours: TrainStep, course: list[float], weights: dict[str, Tensor]) -> dict[str, Any]:
    """Losses and weights of a course of steps beside those of one process; and the sizes of what it trains."""
    slices, expected = one_process(ours.parallel.replicas)
    parameters = dict(slices.model.named_parameters())
    return {
        "losses": [course, expected],
        "weights": apart(weights, {name: p.detach() for name, p in parameters.items()}),
        "bytes": sum(p.nbytes for p in parameters.values()),
        "vector_bytes": sum(p.nbytes for p in parameters.values() if p.dim() < 2),
        "table_bytes": sum(p.nbytes for name, p in parameters.items() if name.endswith(("wte.weight", "wpe.weight"))),
        "flop": ours.model.flop_per_token(16) / slices.model.flop_per_token(16),  # type: ignore[operator]
        "largest": max(p.numel() for p in parameters.values()),
    }


def saved(step: TrainStep) -> bool:
    """Whether what rank 0 writes is the weights that all have together; on the way no rank waits for another in vain."""
    model: Any = step.model
    weights = {name: step.parallel.whole(p.detach(), p) for name, p in model.named_parameters()}
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


class InParts(nn.Module):
    """A Linear whose gradient comes in two parts, of reentrant checkpoints, the first of them early; and one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.unused, self.mixed = (nn.Linear(8, 8) for _ in range(3))
        self.reentrant = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            x = self.own(x)
            x = x + (checkpoint(self.mixed, x, use_reentrant=True) if self.reentrant else self.mixed(x))
        return (x - y).square().mean()


def in_parts(mode: str) -> dict[str, Any]:
    """The largest error of a gradient in the second pass; and what is said of parts that only that one brings."""
    usual, ddp.BUCKET_BYTES = ddp.BUCKET_BYTES, 1
    torch.manual_seed(0)
    x, y = torch.randn(2, ROWS, 8, dtype=torch.float64)
    steps = []
    for divided in (parallel.load(mode), parallel.load(mode), SINGLE):
        torch.manual_seed(0)
        steps.append(TrainStep(InParts().double(), OPTIM, precision="fp64", mode="eager", parallel=divided))
    model: Any = steps[1].model
    model.reentrant = False
    try:
        for step in steps:
            step.gradients(x, y)
        model.reentrant = True
        return {
            "error": apart(steps[0].gradients(x, y)[1], steps[2].gradients(x, y)[1]),
            "refused": refusal(lambda: steps[1].gradients(x, y)),
        }
    finally:
        ddp.BUCKET_BYTES = usual


def unreached(mode: str) -> dict[str, Any]:
    """Of the optimizer with one table, what becomes of a parameter that no pass reaches, and of the others beside one's."""
    steps = []
    x, y = torch.randn(2, ROWS, 8, generator=torch.Generator().manual_seed(0))
    for divided in (parallel.load(mode), SINGLE):
        torch.manual_seed(0)
        how: dict[str, Any] = {"precision": "fp32", "mode": "eager", "optimizer": "reference"}
        steps.append(TrainStep(InParts(), OPTIM, parallel=divided, **how))
    model: Any = steps[0].model
    before = model.unused.weight.detach().clone()
    for step in steps:
        for _ in range(2):
            step(x, y)
    weights = [{name: p.detach() for name, p in step.model.named_parameters()} for step in steps]
    return {
        "stays": torch.equal(model.unused.weight, before),
        "error": apart(*weights),
        "reached": sorted(steps[0].gradients(x, y)[1]),
    }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(part(x).tanh() for part in self.parts)


class Planned(nn.Module):
    """Pairs of Linears, of which one has two matrices below each other, and a norm of each head between, as a plan says."""

    tp_plan: ClassVar = {
        "*.up": "packed_colwise",
        "*.norm": "replicated_with_grad_allreduce",
        "*.down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 32), "norm": nn.LayerNorm(4), "down": nn.Linear(16, 8)}) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            gate, up = block["up"](x).chunk(2, -1)  # type: ignore[index]
            heads = (gate.sigmoid() * up).unflatten(-1, (-1, 4))
            x = x + block["down"](block["norm"](heads).flatten(-2))  # type: ignore[index]
        return (self.head(x) - y[..., :3]).square().mean()


class Gathered(Planned):
    """Phi 3's plan, by which each Linear gathers what the next one splits."""

    tp_plan: ClassVar = {"*.up": "colwise_gather_output", "*.down": "rowwise_split_input"}


class GatedMLP(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Gated(nn.Module):
    """An MLP whose last Linear is in two places; in FP8, but for Linears of torch's own."""

    tp_plan: ClassVar = {"*.gate_proj": "colwise", "*.up_proj": "colwise", "*.down_proj": "rowwise"}

    def __init__(self, parts: str | None) -> None:
        super().__init__()
        self.mlp = GatedMLP()
        self.last = self.mlp.down_proj
        if parts is None:
            self.mlp.gate_proj.register_forward_hook(lambda module, inputs, y: 2 * y)
        else:
            assert te.convert(self, parts=parts).parts[0].after is not None

    def autocast(self, enabled: bool = True) -> Any:
        return te.autocast(enabled, recipe=Float8CurrentScaling())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.mlp(x)
        x = x + self.last(self.mlp.gate_proj(x) * self.mlp.up_proj(x))
        return (x - y).square().mean()


def compiled() -> dict[str, Any]:
    """A step whose Linears add up their input's gradient once, as torch.compile traces it; graphs, breaks, and a copy."""
    usual = torch.compile
    torch.compile = functools.partial(usual, backend="aot_eager")  # type: ignore[assignment]
    try:
        found: dict[str, Any] = {}
        steps = []
        for mode, divided in (("compile", parallel.load("tp")), ("eager", SINGLE)):
            torch.manual_seed(0)
            steps.append(TrainStep(Halves(), OPTIM, precision="fp32", mode=mode, parallel=divided))
        x, y = torch.randn(2, ROWS, 8)
        found["error"] = apart(*(step.gradients(x, y)[1] for step in steps))
        found["sent"] = collectives.of_call(lambda: steps[0](x, y))
        counters = torch._dynamo.utils.counters
        found["graphs"] = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        found["copied"] = len(list(copy.deepcopy(steps[1].model).parameters()))
        return found
    finally:
        torch.compile = usual


class Halves(nn.Module):
    """Two MLPs, each of whose first Linears are two; in_fp8: te's."""

    tp_plan: ClassVar = Gated.tp_plan
    autocast = Gated.autocast

    def __init__(self, in_fp8: bool = False) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(GatedMLP(32 if in_fp8 else 8) for _ in range(2))
        if in_fp8:
            te.convert(self)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = mlp(x)
        return (x - y).square().mean()


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


def nested(mode: str, **options: Any) -> float:
    """The largest error of a gradient of a user's model, whose blocks lie in lists of lists."""
    return beside(mode, Nested, **options)


def beside(
    mode: str,
    make: Callable[[], nn.Module],
    dtype: torch.dtype = torch.float64,
    sent: list[dict[str, Any]] | None = None,
    **options: Any,
) -> float:
    """The largest error of a gradient of a model of its own; sent: is added the collectives of a pass."""
    width, steps, precision = 8, [], {torch.float64: "fp64", torch.float32: "fp32"}[dtype]
    for divided in (parallel.load(mode, **options), SINGLE):
        torch.manual_seed(0)
        steps.append(TrainStep(make().to(dtype), OPTIM, precision=precision, mode="eager", parallel=divided))
        width = next(steps[0].model.parameters()).shape[-1]
    x, y = torch.randn(2, ROWS, width, dtype=dtype)
    if sent is not None:
        sent += collectives.of_call(lambda: steps[0].gradients(x, y)) or []
    return apart(*(step.gradients(x, y)[1] for step in steps))


def decoder_by(mode: str, config: Any, padded: int | None = None, **options: Any) -> float:
    torch.manual_seed(0)
    models = [decoder.build(config, attention="manual", padded_vocab_size=padded).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = [
        TrainStep(model, OPTIM, precision="fp64", mode="eager", parallel=divided)
        for model, divided in zip(models, (parallel.load(mode, **options), SINGLE), strict=True)
    ]
    return apart(*(step.gradients(*batch(0))[1] for step in steps))


def in_fp8(mode: str, optimizer: str | None, **options: Any) -> dict[str, Any]:
    """Scales and weights after some steps of delayed scaling: in every rank the same."""
    step = a_step(parallel.load(mode, **options), "fp8", optimizer=optimizer)
    course = losses(step, FP8_STEPS)
    scales = [t.float() for name, t in step.model.state_dict().items() if "fp8" in name and "scale" in name]
    weights = [step.parallel.whole(p.detach(), p) for p in step.model.parameters()]
    mine = torch.cat([t.flatten() for t in (*scales, *weights)])
    rank_0 = mine.clone()
    dist.broadcast(rank_0, src=0)
    return {
        "losses": course,
        "one": fp8_of_one("delayed") if dist.get_rank() == 0 else None,
        "alike": torch.equal(mine, rank_0),
        "scales": len(scales),
        "collectives": collectives.of_call(lambda: step(*batch(0))),
        "asked": step.parallel.gathered(step.model, None, ROWS * 16),
    }


def gathers(name: str, mode: str = "fsdp2", **options: Any) -> dict[str, Any]:
    """Weights that are gathered in FP8 beside those that one process casts, in either pass, and what is sent for them."""
    recipe = RECIPES[name]
    step = a_step(parallel.load(mode, gather="fp8", **options), "fp8", recipe=recipe, accumulate=2)
    course = losses(step, FP8_STEPS)
    layers = [module for module in step.model.modules() if isinstance(module, Linear)]
    whole = [step.parallel.whole(layer.weight.detach()) for layer in layers]
    made: list[Any] = []

    def cast(*_: Any) -> None:
        scales = [layer.recipe_state().get("scale_fwd", torch.ones(2))[1] for layer in layers]
        by_rows = {"rowwise": True, "columnwise": False}
        made[:] = [recipe.quantize(w, "weight", Slot(s), **by_rows) for w, s in zip(whole, scales, strict=True)]

    same: dict[str, list[bool]] = {"forward": [], "backward": [], "widened": [], "aligned": []}

    def compare(when: str, i: int, layer: Any) -> None:
        data, scale_inv = layer.weight.quantized()[:2]
        equal = torch.equal(data.view(torch.uint8), made[i].data.view(torch.uint8))
        same[when].append(equal and torch.equal(scale_inv, made[i].scale_inv))
        same["aligned"].append(scale_inv.data_ptr() % 16 == 0)
        if when == "forward":
            expected = dequantize(made[i].by_rows(), torch.bfloat16)
            same["widened"].append(torch.equal(layer.weight * 1, expected))

    hooks: list[Any] = [step.model.register_forward_pre_hook(cast)]
    for i, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(lambda layer, _, i=i: compare("forward", i, layer)))
        hooks.append(layer.register_full_backward_pre_hook(lambda layer, _, i=i: compare("backward", i, layer)))
    step(*batch(FP8_STEPS))
    for hook in hooks:
        hook.remove()
    histories = [layer.recipe_state().get("amax_history_fwd") for layer in layers]
    largest = [h is None or h[-1, 1] == weight.abs().max() for h, weight in zip(histories, whole, strict=True)]
    return {
        "losses": course,
        "one": fp8_of_one(name, 2) if dist.get_rank() == 0 else None,
        "same": {when: [len(each), sum(each)] for when, each in same.items()},
        "amaxes": all(largest),
        "collectives": collectives.of_call(lambda: step(*batch(0))),
        "elements": sum(weight.numel() for weight in whole),
        "asked": step.parallel.gathered(step.model, "fp8"),
        "refused": refusal(lambda: step.model(*batch(0))),
        "saved": saved(step),
    }


def tabled(mode: str, **options: Any) -> tuple[TrainStep, Tensor]:
    """A step by te-bench's optimizer after two updates, and all of its weights."""
    step = a_step(parallel.load(mode), **options)
    losses(step, 2)
    return step, torch.cat([p.detach().flatten() for p in step.model.parameters()])


def sharded_table() -> dict[str, Any]:
    """zero1 by te-bench's AdamW beside ddp by it: in Triton's interpreter, and in FP8 with copies that an update leaves."""
    found: dict[str, Any] = {}
    for name, precision, optimizer in (("triton", "fp32", "triton"), ("fp8", "fp8", "reference")):
        options = {"precision": precision, "optimizer": optimizer}
        of_two = [tabled(mode, **options, grad_clip=1e9)[1] for mode in ("zero1", "ddp")]
        found[name] = torch.equal(*of_two)
    ours, theirs = (tabled(mode, precision="fp32", optimizer="triton", grad_clip=0.1) for mode in ("zero1", "ddp"))
    found["clipped"] = ((ours[1] - theirs[1]).abs().max() / theirs[1].abs().max()).item()
    one = a_step(SINGLE, "fp32", optimizer="triton")
    expected = one.gradients(*batch(0))[1]
    found["gradients"] = apart(
        a_step(parallel.load("zero1"), "fp32", optimizer="triton").gradients(*batch(0))[1], expected
    )
    states = ours[0].optimizer.state.items()
    found["moments"] = ours[0].parallel.of_all(sum(t.numel() for of, s in states if of != "step" for t in s.values()))
    sizes = [p.numel() for p in ours[0].model.parameters()]
    found["elements"], found["largest"] = sum(sizes), max(sizes)
    found["collectives"] = collectives.of_call(lambda: ours[0](*batch(0)))
    return found


def theirs(mode: str, config: Any, rival: str = "torchtitan") -> TrainStep:
    """A rival's step in bf16, as its project divides it."""
    torch.manual_seed(0)
    model = decoder.build(config, attention="manual", padded_vocab_size=64)
    own = rivals.load(rival)
    own.build(model)
    assert own.way is not None
    return TrainStep(model, UNCLIPPED, precision="bf16", mode="eager", parallel=ways.kind(own.way, mode)())


def beside_theirs(mode: str, config: Any, way: str, rival: str | None = None) -> dict[str, float]:
    """Errors of a project's step in float64, by te-bench's own modules, and of three losses of its training."""
    torch.manual_seed(dist.get_rank())  # rank 0's weights are what all train
    model = decoder.build(config, attention="manual", padded_vocab_size=64).double()
    if rival is not None:
        in_high_precision(model, rival)
    ours = TrainStep(model, OPTIM, precision="fp64", mode="eager", parallel=ways.kind(way, mode)())
    loss, gradients = ours.gradients(*batch(0))
    assert ours.grad_norm is not None
    norm, course = ours.grad_norm.item(), losses(ours, 3)
    if dist.get_rank():
        return {}
    expected, truth, norm_of_one, course_of_one = theirs_of_one(config)
    return {
        "loss": abs(loss / expected - 1),
        "gradients": apart(gradients, truth),
        "norm": abs(norm / norm_of_one - 1),
        "course": max(abs(a / b - 1) for a, b in zip(course, course_of_one, strict=True)),
    }


def in_high_precision(model: Any, rival: str) -> None:
    """Let the rival change the model, and run outside of its autocast."""
    rivals.load(rival).build(model)
    model.passes = model.passes._replace(autocast=lambda *_, **__: contextlib.nullcontext())


def theirs_alone(config: Any, optim: Optim = OPTIM) -> TrainStep:
    """The same model by te-bench's step in one process."""
    torch.manual_seed(0)
    model = decoder.build(config, attention="manual", padded_vocab_size=64).double()
    return TrainStep(model, optim, precision="fp64", mode="eager")


def of_rivals() -> dict[str, Any]:
    """torchtitan's ways: beside one process in float64, and what they send in bf16."""
    models = {"gpt": SMALL, "llama": DECODERS["llama"]}
    found: dict[str, Any] = {}
    found["replicated"] = {name: beside_theirs("ddp", config, "transformer_engine") for name, config in models.items()}
    for mode in ("fsdp2", "tp"):
        errors = {name: beside_theirs(mode, config, "torchtitan") for name, config in models.items()}
        step = theirs(mode, DECODERS["llama"])
        step(*batch(0))  # the first one plans what follows
        found[mode] = {"errors": errors, "collectives": collectives.of_call(lambda s=step: s(*batch(0)))}  # type: ignore[misc]
    sizes = {name: p.numel() for name, p in theirs_alone(DECODERS["llama"]).model.named_parameters()}
    found["elements"] = sum(sizes.values())
    found["tables"] = sum(sizes[name] for name in ("model.norm.weight", "lm_head.weight"))
    found["refused"] = [refusal(lambda c=c: theirs("tp", c)) for c in (DECODERS["qwen 3"], *REFUSED)]  # type: ignore[misc]
    if importlib.util.find_spec("torchao"):
        found["torchao"] = of_torchao()
    return found


def of_engine() -> dict[str, Any]:
    """Transformer Engine's ways by a stand-in: beside one process in float64; in bf16 and FP8 errors of all gradients."""
    import engine_by_te  # resume_cases, which takes some of this file, has no path to it

    engine_by_te.plant()
    found: dict[str, Any] = {}
    for mode in ("ddp", "fsdp2", "tp"):
        way = functools.partial(ways.kind("transformer_engine", mode))
        errors = {
            name: beside_theirs(mode, config, "transformer_engine", "transformer_engine_current")
            for name, config in DECODERS.items()
        }
        found[mode] = {"errors": errors}
        for recipe in (None, "delayed", "current"):
            ours, *of_ours = engine_found(recipe, way())
            of_one = engine_of_one(recipe) if dist.get_rank() == 0 else of_ours
            both, courses = zip(of_ours, of_one, strict=True)
            found[mode][recipe or "bf16"] = {
                "errors": both,
                "losses": courses,
                "collectives": collectives.of_call(lambda s=ours: s(*batch(0))),  # type: ignore[misc]
                "asked": ours.parallel.gathered(ours.model, None, ROWS * 16),
            }
    found["refused"] = refusal(lambda: theirs("tp", ODD, "transformer_engine_current"))
    return found


@functools.cache
def theirs_of_one(config: Any) -> tuple[float, dict[str, Tensor], float, list[float]]:
    """Loss, gradients and norm of one process's first pass, and the losses of three steps; every mode is held to them."""
    one = theirs_alone(config)
    loss, gradients = one.gradients(*batch(0))
    assert one.grad_norm is not None
    return loss, gradients, one.grad_norm.item(), losses(one, 3)


@functools.cache
def unclipped_of_one() -> dict[str, Tensor]:
    """A Llama's gradients in float64."""
    return theirs_alone(DECODERS["llama"], UNCLIPPED).gradients(*batch(0))[1]


def engine_found(recipe: str | None, divided: Parallel) -> tuple[TrainStep, float, list[float]]:
    """Transformer Engine's step; the error of its second pass's gradients beside float64's, and its losses from there on."""
    step = engine_step(recipe, divided)
    step.gradients(*batch(0), records=True)  # delayed scaling casts with scales of 1
    error = off(step.gradients(*batch(0))[1], unclipped_of_one())
    return step, error, losses(step, 5)


@functools.cache
def engine_of_one(recipe: str | None) -> tuple[float, list[float]]:
    """Error and losses of one process; every mode is held to them."""
    return engine_found(recipe, SINGLE)[1:]


def engine_step(recipe: str | None, divided: Parallel) -> TrainStep:
    """Transformer Engine's step of a Llama in bf16, or under that recipe."""
    torch.manual_seed(0)
    model = decoder.build(DECODERS["llama"], attention="manual", padded_vocab_size=64)
    if recipe is None:
        in_high_precision(model, "transformer_engine_current")
    else:
        rivals.load(f"transformer_engine_{recipe}").build(model)
    precision = "bf16" if recipe is None else "fp8"
    return TrainStep(model, UNCLIPPED, precision=precision, mode="eager", parallel=divided)


def off(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The error of all gradients together, of their norm."""
    assert found.keys() == truth.keys()
    squares = torch.stack([(found[name] - truth[name]).double().square().sum() for name in truth])
    return (squares.sum() / sum(t.square().sum() for t in truth.values())).sqrt().item()


def of_torchao() -> dict[str, Any]:
    """Its recipes, emulated: gradients beside float64's, and what is sent. gloo takes FP8 as bytes alone."""
    from torchao.float8 import Float8LinearConfig, float8_ops

    def as_bytes(operator: Any, args: Any, kwargs: Any = None) -> Any:
        sent = operator(args[0]._data.contiguous().view(torch.uint8), *args[1:], **(kwargs or {}))
        data = torch.ops._c10d_functional.wait_tensor(sent).view(args[0]._data.dtype)
        rest = (args[0]._scale, args[0]._orig_dtype, args[0]._linear_mm_config, args[0]._gemm_input_role)
        return type(args[0])(data, *rest)

    table: dict[Any, Any] = float8_ops.FLOAT8_OPS_TABLE
    table |= {operator: as_bytes for operator in table if "all_gather_into_tensor" in str(operator)}
    usual = Float8LinearConfig.from_recipe_name
    Float8LinearConfig.from_recipe_name = lambda name: dataclasses.replace(usual(name), emulate=True)
    truth, found = unclipped_of_one(), {}
    for name, mode in itertools.product(("tensorwise", "rowwise"), ("fsdp2", "tp")):
        step = theirs(mode, DECODERS["llama"], f"torchao_{name}")
        _, gradients = step.gradients(*batch(0))
        step(*batch(0))
        sent = collectives.of_call(lambda s=step: s(*batch(0)))  # type: ignore[misc]
        errors = [((gradients[n].double() - truth[n]).norm() / truth[n].norm()).item() for n in truth]
        asked = step.parallel.gathered(step.model, None, ROWS * 16)
        found[f"{name} {mode}"] = {"error": max(errors), "collectives": sent, "asked": asked}
    return found


def headed(divided: Parallel) -> TrainStep:
    """A step whose head computes the loss without logits."""
    torch.manual_seed(0)
    model = decoder.build(SMALL, attention="manual", head="chunked")
    return TrainStep(model, OPTIM, precision="fp32", mode="eager", parallel=divided)


def seeds(mode: str, **options: Any) -> list[int]:
    """Of three seeds of a repetition, all ranks'."""
    own = torch.tensor([parallel.load(mode, **options).seed(seed) for seed in range(3)])
    each = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(each, own)
    return torch.cat(each).tolist()


def dropped() -> list[float]:
    """What dropout leaves of a rank's ones between layers, all ranks'."""
    step = TrainStep(
        GPT(REFUSED[1], attention="manual"),
        OPTIM,
        precision="fp32",
        mode="eager",
        parallel=parallel.load("tp", sequence_parallel=True),
    )
    seen: list[Tensor] = []
    layer: Any = step.model.transformer.drop  # type: ignore[union-attr]
    layer.register_forward_hook(lambda _, inputs, y: seen.append((y != 0).double().flatten()))
    step(*batch(0))
    return [x.item() for x in step.parallel.of_all(seen[0] @ torch.arange(float(len(seen[0])), dtype=torch.float64))]


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def cases(trial: Trial, context: Context) -> dict[str, Any]:
    """Of two ranks all, of four what another number of shares may change."""
    world = world_of(trial)
    found: dict[str, Any] = {mode: beside_one(mode, world) for mode in MODES}
    found["tp sp"] = beside_one("tp", world, sequence_parallel=True)
    found["planned"] = beside("tp", Planned)
    found["decoders"] = {name: decoder_by("tp", config) for name, config in DECODERS.items()}
    found["decoders"]["qwen 3 sp"] = decoder_by("tp", DECODERS["qwen 3"], sequence_parallel=True)
    found["decoders"]["padding"] = decoder_by("tp", BIASED, padded=128, sequence_parallel=True)
    found["fp8"] = {"ddp": in_fp8("ddp", "reference"), "fsdp2": in_fp8("fsdp2", None), "tp": in_fp8("tp", None)}
    found["fp8"]["tp sp"] = in_fp8("tp", None, sequence_parallel=True)
    found["gathers"] = {name: gathers(name) for name in RECIPES}
    if world > 2:
        return {"outcome": "ok", "reason": None, "samples": {}, "found": found}
    found["rivals"] = of_rivals()
    found["engine"] = of_engine()
    found["nested"] = {mode: nested(mode) for mode in MODES if mode != "tp"}
    kinds = ((str(parts), functools.partial(Gated, parts)) for parts in (None, "mlp"))
    sent: list[dict[str, Any]] = []
    found["gated"] = {name: beside("tp", make, torch.float32, sent) for name, make in kinds}
    found["gated fp8"] = beside("tp", functools.partial(Halves, True), torch.float32, sent)
    found["gated sent"] = [each for each in sent if (each["name"], each["dtype"]) == ("allreduce", "float32")]
    found["compiled"] = compiled()
    found["not planned"] = refusal(lambda: nested("tp"))
    found["adopted"] = refusal(lambda: beside("tp", lambda: adopt(Nested()), torch.float32))
    found["whole"] = refusal(lambda: beside("tp", Gathered))
    found["refused"] = [refusal(lambda c=c: decoder_by("tp", c)) for c in REFUSED]  # type: ignore[misc]
    found["refused sp"] = [
        refusal(lambda: beside("tp", Planned, sequence_parallel=True)),
        refusal(lambda: a_step(parallel.load("tp", sequence_parallel=True), "fp64")(*(x[:, :15] for x in batch(0)))),
        refusal(lambda: a_step(parallel.load("tp"), "fp64").model.logits(batch(0)[0])),  # type: ignore[operator]
        refusal(lambda: headed(parallel.load("tp", sequence_parallel=True))),
    ]
    found["headed"] = [losses(headed(divided), 3) for divided in (*map(parallel.load, ("tp", "fsdp2")), SINGLE)]
    found["seeds"] = {mode: seeds(mode, **said) for mode, said in (("ddp", {}), ("tp", {"sequence_parallel": True}))}
    found["dropped"] = dropped()
    found["buckets"] = {str(optimizer): in_small_buckets(optimizer) for optimizer in (None, "reference")}
    found["in parts"] = {mode: in_parts(mode) for mode in ("ddp", "fsdp2")}
    found["unreached"] = {mode: unreached(mode) for mode in ("ddp", "zero1")}
    found["table"] = sharded_table()
    return {"outcome": "ok", "reason": None, "samples": {}, "found": found}


def on_hosts(*names: str) -> str:
    """How many ranks of four on hosts of these names share weights where nobody says it, or why nobody can tell."""
    usual, socket.gethostname = socket.gethostname, lambda: names[dist.get_rank()]
    try:
        return f"{parallel.load('hsdp').shards}"
    except parallel.Indivisible as error:
        return str(error)
    finally:
        socket.gethostname = usual


def in_groups(trial: Trial, context: Context) -> dict[str, Any]:
    world = world_of(trial)
    found = {
        "hsdp": beside_one("hsdp", world, shard=2),
        "fsdp2+tp": beside_one("fsdp2+tp", world, shard=2),
        "fsdp2+tp sp": beside_one("fsdp2+tp", world, shard=2, sequence_parallel=True),
        "nested": nested("hsdp", shard=2),
        "planned": beside("fsdp2+tp", Planned, shard=2),
        "qwen 3": decoder_by("fsdp2+tp", DECODERS["qwen 3"], shard=2),
        "gather": gathers("current", "hsdp", shard=2),
        "hosts": {" ".join(names): on_hosts(*names) for names in ("aabb", "aaaa", "abab", "aaab")},
        "refused": [
            refusal(lambda n=shard, m=mode: parallel.load(m, shard=n))
            for mode in parallel.GROUPED
            for shard in (1, 3, 4)
        ],
    }
    accumulating = a_step(parallel.load("hsdp", shard=2), "fp64", accumulate=2)
    accumulating(*batch(0))  # the first pass plans the buckets
    found["accumulating"] = collectives.of_call(lambda: accumulating(*batch(0)))
    return {"outcome": "ok", "reason": None, "samples": {}, "found": found}


def at(world: int, cases: Callable[[Trial, Context], dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 of so many found."""
    problem = {"model": "tiny", "block": 16, "vocab": 50, "padded_vocab": 64, "batch": ROWS}
    problem |= {"parallel": "ddp", "world": world}
    asked = Trial(workload="train_step", device="cpu", problem=problem, attention="manual")
    for name in (
        "te_bench.training.parallel.fsdp2_tp",
        "torch.distributed.optim",
        "torch._dynamo",
    ):  # and FSDP2 and DTensor
        importlib.import_module(name)  # once for all ranks
    gc.collect()
    gc.freeze()  # each rank looks for garbage with each model: not among what is imported
    return ranks.run(asked, Context(), cases)


if __name__ == "__main__":
    import interpreter

    interpreter.quicken()
    kernels.INTERPRETED = tied.INTERPRETED = False  # of Triton's kernels the optimizer's are asked for
    if "2" in sys.argv[1:]:
        for name in ("te_bench.models.huggingface", "torch._inductor.compile_fx", "networkx"):  # and transformers
            importlib.import_module(name)  # once for all ranks
    asked = {"2": (2, cases), "4": (4, cases), "groups": (4, in_groups)}
    print(json.dumps({name: at(*asked[name]) for name in sys.argv[1:]}))
