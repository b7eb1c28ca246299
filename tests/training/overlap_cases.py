"""GEMMs that overlap with their collectives, for test_overlap: python overlap_cases.py prints what two ranks found, as JSON.

Operators of symmetric memory are CUDA's alone. On a CPU torch's own decompositions stand in for them, over gloo; those in
FP8 gather bytes and multiply as te-bench's emulation does.
"""

import dataclasses
import functools
import gc
import importlib
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

import te_bench.models as te
from te_bench.experiments import ranks
from te_bench.experiments import trial as child
from te_bench.experiments.instruments import collectives
from te_bench.experiments.measurement import Context
from te_bench.experiments.spec import Trial
from te_bench.kernels.gemm.backends import reference
from te_bench.kernels.quantize import PLAIN, TENSOR, Layout, Operand
from te_bench.models import decoder
from te_bench.models.configs import LlamaConfig
from te_bench.models.modules import symmetric
from te_bench.models.modules.tensor_parallel import Ranks
from te_bench.models.recipe import DelayedScaling, Float8CurrentScaling, Recipe, RowwiseScaling
from te_bench.models.zoo.gpt import GPTConfig
from te_bench.training import parallel
from te_bench.training.data import Batches
from te_bench.training.parallel import SINGLE, Parallel
from te_bench.training.step import Optim, TrainStep

GPT = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=50, bias=True)
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=4, head_dim=8, block_size=16, vocab_size=50)
RECIPES: dict[str, Recipe] = {"delayed": DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling()}
OVERLAP: dict[str, Any] = {"sequence_parallel": True, "overlap": "symmetric"}
PROBLEM = {"model": "tiny", "block": 16, "vocab": 250, "padded_vocab": 256, "batch": 4, "parallel": "tp", "world": 2}
TRIAL = Trial(workload="train_step", device="cpu", problem={**PROBLEM, **OVERLAP}, attention="manual")
IN_FP8 = dataclasses.replace(TRIAL, precision="fp8", recipe="delayed_scaling")


def stand_in() -> None:
    """In this process: what computes on a CPU as symmetric memory's operators do on GPUs."""
    library = torch.library.Library("symm_mem", "IMPL")
    stand_in.library = library  # type: ignore[attr-defined]  # as long as it lives
    torchs: Any = _symmetric_memory
    library.impl("fused_all_gather_matmul", torchs._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", torchs._fused_matmul_reduce_scatter_fallback, "CPU")
    library.impl("fused_all_gather_scaled_matmul", gathered, "CPU")
    library.impl("fused_scaled_matmul_reduce_scatter", scattered, "CPU")
    symmetric.unsupported = lambda ranks: None
    symmetric.unshared = lambda group: None


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: Any, fast: bool) -> Tensor:
    (dtype,) = _symmetric_memory._maybe_convert_scalar_types_to_dtypes([dtype])
    x, w = (
        Operand(data, scale, Layout(data.dtype, TENSOR, torch.float32, PLAIN))
        for data, scale in ((a, a_scale), (b.t(), b_scale))
    )
    return reference.forward(x, w, out_dtype=dtype, fast_accum=fast)


def gathered(a: Any, bs: Any, a_scale: Any, b_scales: Any, dim: int, group: str, *rest: Any) -> Any:
    _, _, dtypes, fast = rest
    own = a.view(torch.uint8)
    whole = own.new_empty(2 * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(whole, own)
    whole = whole.view(a.dtype)
    return whole, [product(whole, bs[0], a_scale, b_scales[0], dtypes[0], fast[0])]


def scattered(a: Any, b: Any, a_scale: Any, b_scale: Any, how: str, dim: int, _: int, group: str, *rest: Any) -> Any:
    shape, _, _, dtype, fast = (*rest, False)[:5]  # the dispatcher leaves out what is as by default
    whole = product(a, b, a_scale, b_scale, dtype, fast)
    assert list(whole.shape) == list(shape)
    own = whole.new_empty(len(whole) // 2, whole.shape[1])
    dist.reduce_scatter_tensor(own, whole)
    return own


def linears(mode: str, dtype: torch.dtype, kind: str | None = None, bias: bool = True) -> dict[str, Any]:
    """The largest difference of a Linear's output and gradients from those where GEMM and collective are apart."""
    found: dict[str, Any] = {}
    results = []
    for overlaps in (False, True):
        torch.manual_seed(dist.get_rank())
        layer = te.Linear(32, 64, parallel_mode=mode, tp_group=dist.group.WORLD, sequence_parallel=True, bias=bias)
        layer = layer.to(dtype)
        layer.ranks.overlaps = overlaps
        x = torch.randn((4, 3, 32) if mode == "column" else (8, 3, 16), dtype=dtype)
        own, seen = x.clone().requires_grad_(), []

        def call(own: Tensor = own, seen: list[Tensor] = seen, layer: te.Linear = layer) -> None:
            half = torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16")
            recipe = RECIPES.get(kind or "")
            with half, te.autocast(recipe is not None, recipe=recipe, amax_reduction_group=dist.group.WORLD):
                y = layer(own)
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
            seen.append(y.detach())

        found["sent" if overlaps else "apart"] = collectives.of_call(call)
        results.append([*seen, own.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
    assert [t.dtype for t in results[0]] == [t.dtype for t in results[1]]
    found["differ"] = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*results, strict=True))
    return found


def batch(number: int) -> tuple[Tensor, Tensor]:
    return Batches(None, block=16, batch=8, vocab=50, seed=7).at(number)


def a_step(
    divided: Parallel, config: Any, precision: str, recipe: Recipe | None = None, mode: str = "eager"
) -> TrainStep:
    torch.manual_seed(0)
    model = decoder.build(config, attention="manual", padded_vocab_size=64, recipe=recipe)
    model = model.double() if precision == "fp64" else model
    return TrainStep(model, Optim(grad_clip=0.5), precision=precision, mode=mode, parallel=divided)


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs)


def steps(config: Any) -> dict[str, Any]:
    """A step in float64 beside one process's, and what it was to send and sent."""
    ours, one = a_step(parallel.load("tp", **OVERLAP), config, "fp64"), a_step(SINGLE, config, "fp64")
    found = {"error": apart(*(step.gradients(*batch(0))[1] for step in (ours, one)))}
    sent = collectives.of_call(lambda: ours(*batch(0)))
    return {**found, "sent": sent, "due": ours.parallel.overlapped(8 * 16)}


def in_fp8(name: str) -> list[list[float]]:
    """Losses with and without the overlap."""
    options: list[dict[str, Any]] = [OVERLAP, {"sequence_parallel": True}]
    made = [a_step(parallel.load("tp", **said), LLAMA, "fp8", RECIPES[name]) for said in options]
    return [[step(*batch(number)).item() for number in range(4)] for step in made]


def compiled() -> dict[str, Any]:
    """A Llama's step in one graph, beside an eager one."""
    usual = torch.compile
    torch.compile = functools.partial(usual, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    try:
        ours = a_step(parallel.load("tp", **OVERLAP), LLAMA, "fp32", mode="compile")
        eager = a_step(parallel.load("tp", **OVERLAP), LLAMA, "fp32")
        error = apart(*(step.gradients(*batch(0))[1] for step in (ours, eager)))
        return {"error": error, "sent": collectives.of_call(lambda: ours(*batch(0)))}
    finally:
        torch.compile = usual


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def refusals() -> dict[str, str]:
    """Before anything stands in, and of what no operator of symmetric memory multiplies."""
    found = {"gloo": refusal(lambda: a_step(parallel.load("tp", **OVERLAP), LLAMA, "fp32"))}
    found["alone"] = refusal(lambda: parallel.load("tp", overlap="symmetric"))
    found["unknown"] = refusal(lambda: parallel.load("tp", sequence_parallel=True, overlap="symetric"))
    stand_in()
    for mode in ("cudagraph", "compile-reduce-overhead"):
        found[mode] = refusal(lambda m=mode: a_step(parallel.load("tp", **OVERLAP), LLAMA, "fp32", mode=m))  # type: ignore[misc]
    odd = dataclasses.replace(LLAMA, intermediate_size=72)
    asked = {"rows": (LLAMA, RowwiseScaling()), "emulated": (LLAMA, Float8CurrentScaling(emulate=True))}
    asked["bf16 wgrad"] = (LLAMA, Float8CurrentScaling(bf16_wgrad=True))
    for name, (config, recipe) in {**asked, "odd": (odd, RECIPES["current"])}.items():
        made = functools.partial(a_step, parallel.load("tp", **OVERLAP), config, "fp8", recipe)
        found[name] = refusal(made)
    symmetric.unshared = lambda group: "torch lets these GPUs share no memory (said by a test)"
    found["unshared"] = refusal(lambda: a_step(parallel.load("tp", **OVERLAP), LLAMA, "fp32"))
    symmetric.unshared = lambda group: None
    return found


def cases(trial: Trial, context: Context) -> dict[str, Any]:
    found: dict[str, Any] = {"refused": refusals()}
    found["linears"] = {
        f"{mode} {kind} {bias}": linears(mode, torch.float64 if kind is None else torch.float32, kind, bias)
        for mode in ("column", "row")
        for kind in (None, "bf16", *RECIPES)
        for bias in (True, False)
    }
    gc.collect()  # delayed scaling shares the amaxes of every state that lives
    found["steps"] = {"gpt": steps(GPT), "llama": steps(LLAMA)}
    found["fp8"] = {name: in_fp8(name) for name in RECIPES}
    found["compiled"] = compiled()
    return {"outcome": "ok", "reason": None, "samples": {}, "found": found}


def standing_in(trial: Trial, context: Context) -> dict[str, Any]:
    stand_in()
    return child.run_one(trial, context)


def without(trial: Trial, context: Context) -> dict[str, Any]:
    """A step that asked for the overlap, and whose GEMMs and collectives are apart."""
    stand_in()
    Ranks.symmetric = None  # type: ignore[assignment,method-assign]
    return child.run_one(trial, context)


if __name__ == "__main__":
    for name in ("torch._inductor.compile_fx", "torch.distributed.optim", "te_bench.training.parallel.tp", "networkx"):
        importlib.import_module(name)  # once for all ranks; the first also by the profiler
    gc.freeze()
    context = Context()
    found = {"cases": ranks.run(TRIAL, context, cases), "fp8": ranks.run(IN_FP8, context, standing_in)}
    found["without"] = ranks.run(TRIAL, context, without)
    found["on a CPU"] = ranks.run(TRIAL, context, child.run_one)
    print(json.dumps(found))
