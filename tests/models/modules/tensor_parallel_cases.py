"""What N ranks compute with divided modules beside one rank with whole ones, for test_tensor_parallel.

python tensor_parallel_cases.py FOLDER DEVICE N writes "FOLDER/RANK of N.pt". A CPU has forks: one import of torch.
"""

import copy
import functools
import gc
import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

import te_bench.models as te
from te_bench.experiments.instruments import collectives
from te_bench.models import faults, recipe

SEQUENCE, BATCH, HIDDEN, FFN, HEADS, GROUPS = 16, 2, 64, 128, 8, 4
DELAYED, CURRENT = recipe.DelayedScaling(amax_history_len=2), recipe.Float8CurrentScaling()
RECIPES: dict[str, recipe.Recipe] = {
    "delayed": DELAYED,
    "current": CURRENT,
    "rowwise": recipe.RowwiseScaling(),
    "bf16 wgrad": recipe.Float8CurrentScaling(bf16_wgrad=True),
    "fault": faults.load("e5m2_forward")(CURRENT),
    "block": recipe.Float8BlockScaling(),
}
HALF: dict[str, Any] = {"init_method": functools.partial(nn.init.normal_, std=0.2)}
LAYER: dict[str, Any] = {**HALF, "hidden_dropout": 0.0, "attention_dropout": 0.0, "num_gqa_groups": GROUPS}

PACKED: dict[str, Any] = {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal"}

#: By name: how to make it of the arguments for ranks, and how often it takes the hidden sizes in.
MODULES: dict[str, Callable[..., nn.Module]] = {
    "column": lambda **tp: te.Linear(HIDDEN, FFN, **HALF, **_mode("column", tp)),
    "row": lambda **tp: te.Linear(HIDDEN, FFN, **HALF, **_mode("row", tp)),
    "normed": lambda **tp: te.LayerNormLinear(HIDDEN, FFN, **HALF, **_mode("column", tp)),
    "gelu": lambda **tp: te.LayerNormMLP(HIDDEN, FFN, **HALF, **tp),
    "swiglu": lambda **tp: te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", normalization="RMSNorm", **HALF, **tp),
    "attention": lambda **tp: te.MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, num_gqa_groups=GROUPS, fuse_qkv_params=True, **HALF, **tp
    ),
    "layer": lambda **tp: te.TransformerLayer(HIDDEN, FFN, HEADS, **LAYER, **tp),
    "norms of heads": lambda **tp: te.MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, num_gqa_groups=GROUPS, qk_norm_type="RMSNorm", **HALF, **tp
    ),
    "after norms": lambda **tp: te.TransformerLayer(
        HIDDEN, FFN, HEADS, apply_residual_connection_post_layernorm=True, output_layernorm=True, **LAYER, **tp
    ),
}


def _mode(mode: str, tp: dict[str, Any]) -> dict[str, Any]:
    """A Linear says itself how it is divided."""
    rest = {name: value for name, value in tp.items() if name != "set_parallel_mode"}
    return {**rest, "parallel_mode": mode} if tp else {}


def part(whole: Tensor, own: torch.Size, rank: int, pieces: int = 1) -> Tensor:
    """This rank's part of a parameter, of each of its pieces by itself."""
    if whole.shape == own:
        return whole
    dim = next(i for i, (a, b) in enumerate(zip(whole.shape, own, strict=True)) if a != b)
    n = whole.shape[dim] // own[dim]
    return torch.cat([piece.chunk(n, dim)[rank] for piece in whole.chunk(pieces, dim)], dim)


def pieces(name: str, parameter: str) -> int:
    return 2 if name == "swiglu" and parameter.startswith("fc1") else 1


class Both:
    """A whole module, the rank's part of it, and their inputs."""

    def __init__(self, name: str, sequence: bool, dtype: torch.dtype):
        self.name, self.sequence = name, sequence
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(0)
        make = MODULES.get(name, lambda **tp: te.TransformerLayer(HIDDEN, FFN, HEADS, **LAYER, **PACKED, **tp))
        tp: dict[str, Any] = {"tp_group": dist.group.WORLD, "set_parallel_mode": True}
        self.whole = make().to(dtype)
        self.own = make(**tp, sequence_parallel=sequence).to(dtype)
        for key, p in self.whole.named_parameters():
            p.data += 0.1 * torch.randn_like(p)
            mine = self.own.get_parameter(key)
            mine.data.copy_(part(p.data, mine.shape, self.rank, pieces(name, key)))

    def _enters(self, x: Tensor) -> Tensor:
        if self.name == "row":
            return x.chunk(self.world, -1)[self.rank]
        return x.chunk(self.world)[self.rank] if self.sequence else x

    def _leaves(self, y: Tensor) -> Tensor:
        if self.name in ("column", "normed"):
            return y.chunk(self.world, -1)[self.rank]
        return y.chunk(self.world)[self.rank] if self.sequence else y

    def compute(self, x: Tensor, dy_of: Callable[[Tensor], Tensor], context: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """{what: (the rank's, its part of the whole one's)}, gradients too."""
        whole, own = x.clone().requires_grad_(), self._enters(x).clone().requires_grad_()
        with context():
            expected = self.whole(whole)
        with context():
            y = self.own(own)
        dy = dy_of(expected)
        expected.backward(dy)
        y.backward(self._leaves(dy))
        assert whole.grad is not None
        assert own.grad is not None
        found = {"y": (y.detach(), self._leaves(expected.detach())), "dx": (own.grad, self._enters(whole.grad))}
        for key, p in self.whole.named_parameters():
            mine = self.own.get_parameter(key)
            assert p.grad is not None
            assert mine.grad is not None
            if getattr(mine, "sequence_parallel", False):
                dist.all_reduce(mine.grad)
            found[key] = mine.grad, part(p.grad, mine.shape, self.rank, pieces(self.name, key))
            p.grad = mine.grad = None
        return found


def error(pair: tuple[Tensor, Tensor]) -> float:
    ours, theirs = pair
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-2))  # a key bias has the gradient 0


def numbers(dtype: torch.dtype) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    def drawn(seed: int, shape: Any) -> Tensor:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype, device="cpu")
        return x.to(torch.get_default_device())

    return drawn(1, (SEQUENCE, BATCH, HIDDEN)), lambda y: drawn(2, y.shape)


def plain(name: str, sequence: bool) -> dict[str, float]:
    both = Both(name, sequence, torch.float64)
    x, dy = numbers(torch.float64)
    return {what: error(pair) for what, pair in both.compute(x, dy, torch.enable_grad).items()}


def packed() -> float:
    """The largest error of a layer that turns queries and keys of packed sequences, of whose rows a rank has a part."""
    starts = torch.tensor([0, 10, 32], dtype=torch.int32)
    angles = te.RotaryPositionEmbedding(HIDDEN // HEADS)(22).to(starts.device)
    how: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "rotary_pos_emb": angles}
    both = Both("packed", True, torch.float64)
    both.whole.forward, both.own.forward = (functools.partial(m.forward, **how) for m in (both.whole, both.own))
    x, dy = numbers(torch.float64)
    return max(error(pair) for pair in both.compute(x.flatten(0, 1), dy, torch.enable_grad).values())


def in_fp8(name: str, sequence: bool, kind: str) -> dict[str, Any]:
    """Errors between the two in FP8 after three steps, or the first where nothing is kept of a step; of the whole one
    beside float32; and what was sent last.
    """
    both = Both(name, sequence, torch.float32)
    x, dy = numbers(torch.float32)

    def context() -> Any:
        return te.autocast(recipe=RECIPES[kind], amax_reduction_group=dist.group.WORLD)

    found = both.compute(x, dy, context)
    for _ in range(2 if kind == "delayed" else 0):
        found = both.compute(x, dy, context)
    exact = both.compute(x, dy, torch.enable_grad)
    own = both._enters(x).clone().requires_grad_()

    def step() -> None:
        with context():
            y = both.own(own)
        y.backward(torch.ones_like(y))

    return {
        "apart": {what: error(pair) for what, pair in found.items()},
        "noise": {what: error((pair[1], exact[what][1])) for what, pair in found.items()},
        "sent": collectives.of_call(step),
    }


def details(rank: int) -> dict[str, Any]:
    """Marks, copies, micro-batches, and what is refused."""
    found: dict[str, Any] = {"packed": packed()}
    group = dist.group.WORLD
    tp: dict[str, Any] = {"tp_group": group, "set_parallel_mode": True, "sequence_parallel": True}
    layer = MODULES["layer"](**tp)
    found["marks"] = {
        name: (getattr(p, "partition_dim", None), getattr(p, "sequence_parallel", None))
        for name, p in layer.named_parameters()
    }
    x = numbers(torch.float32)[0].chunk(dist.get_world_size())[rank]
    twin = copy.deepcopy(layer)
    found["copied"] = torch.equal(layer(x), twin(x))
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    found["no group"] = said(lambda: loaded(x))
    loaded.set_tensor_parallel_group(group)
    found["loaded"] = torch.equal(layer(x), loaded(x))
    later = MODULES["layer"](tp_size=dist.get_world_size(), set_parallel_mode=True, sequence_parallel=True)
    later.load_state_dict(layer.state_dict())
    later.set_tensor_parallel_group(group)
    found["later"] = torch.equal(layer(x), later(x))

    for first in (True, False):
        with te.autocast(recipe=CURRENT):
            y = layer(x, is_first_microbatch=first)
        found[f"first {first}"] = y.detach()
    with te.autocast(recipe=CURRENT):
        again = te.checkpoint(layer, x.clone().requires_grad_())
        layer.zero_grad()
        again.sum().backward()
    found["checkpointed"] = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())

    with te.autocast(recipe=DELAYED):
        found["not shared"] = said(lambda: layer(x))
    row = te.Linear(64, 64, parallel_mode="row", sequence_parallel=True, tp_group=group)
    found["odd rows"] = said(lambda: row(x[:1, :, :32]))
    found["odd heads"] = said(lambda: te.MultiheadAttention(66, 3, tp_size=2, set_parallel_mode=True))
    found["odd features"] = said(lambda: te.Linear(64, 63, parallel_mode="column", tp_size=2))
    found["not set"] = said(lambda: te.TransformerLayer(64, 64, 2, tp_size=2))
    found["of another size"] = said(lambda: te.Linear(64, 64).set_tensor_parallel_group(group))
    found["row of a norm"] = said(lambda: te.LayerNormLinear(64, 64, parallel_mode="row", tp_size=2))
    found["overlap"] = said(lambda: te.Linear(64, 64, parallel_mode="row", tp_size=2, ub_overlap_rs=True))
    found["no mode"] = said(lambda: te.Linear(64, 64, parallel_mode="rows"))
    found["two sizes"] = said(lambda: te.Linear(64, 64, tp_group=group, tp_size=3))
    return found


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def recipes_of(world: int) -> list[str]:
    """What more ranks change is who has which part, of all modules in float64, and whose amaxes a scale is of."""
    return list(RECIPES) if world == 2 else ["delayed", "current"]


def run(rank: int, world: int, path: Path, device: str) -> None:
    backend = "gloo" if device == "cpu" else "nccl"
    if device == "cuda":
        torch.set_default_device(torch.device(device, rank))
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{path}/meet{world}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    try:
        found: dict[str, Any] = {"plain": {}, "fp8": {}}
        for name in MODULES:
            for sequence in (False, True):
                found["plain"][name, sequence] = plain(name, sequence)
        for kind in recipes_of(world):
            for name in MODULES if (kind, world) == ("delayed", 2) else ("column", "row", "layer"):
                for sequence in (False, True):
                    found["fp8"][kind, name, sequence] = in_fp8(name, sequence, kind)
        if (world, device) == (2, "cpu"):
            found["details"] = details(rank)
        torch.save(found, path / f"{rank} of {world}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    path, device, world = sys.argv[1:]
    method = "fork" if device == "cpu" else "spawn"
    importlib.import_module("torch._dynamo")  # once for all ranks, as what a module imports
    for make in MODULES.values():
        make()
    gc.collect()
    gc.freeze()  # each rank looks for garbage with each model: not among what is imported
    given = int(world), Path(path), device
    torch.multiprocessing.start_processes(run, given, nprocs=int(world), start_method=method)
