"""Two ranks: amaxes shared over their process group, and checkpoints of FSDP2 and DDP that training goes on from."""

import gc
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_bench.models as te
from te_bench.models import recipe

ALGORITHMS = ("max", "most_recent")
KINDS = ("fsdp2", "ddp")
ASKED = recipe.DelayedScaling(amax_history_len=3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks wrote: one start for all tests, and forks of one process, for torch's import takes longest."""
    path = tmp_path_factory.mktemp("ranks")
    done = subprocess.run([sys.executable, __file__, path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return path


def _rank(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    try:
        for algorithm in ALGORITHMS:
            torch.save(_together(rank, algorithm), path / f"{algorithm}{rank}.pt")
            torch.save(_apart(rank, algorithm), path / f"{algorithm}-alone{rank}.pt")
        torch.save(_one_evaluates(rank), path / f"evaluates{rank}.pt")
        torch.save(_one_is_gone(rank), path / f"gone{rank}.pt")
        for kind in KINDS:
            torch.save(_goes_on(kind, rank, path), path / f"{kind}{rank}.pt")
        dist.barrier()  # a rank that is gone aborts one that still waits for it
    finally:
        dist.destroy_process_group()


def _together(rank: int, algorithm: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and numerics after four steps of one model on each rank's own batch."""
    torch.manual_seed(0)
    layers = nn.Sequential(te.LayerNormMLP(32, 48, device="cpu"), te.Linear(32, 16, device="cpu"))
    asked = recipe.DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm)
    for step in range(4):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank)) * 4.0 ** (step * (1 - rank))
        if (rank, step) == (1, 2):
            x[0, 0] = torch.nan
        with te.autocast(recipe=asked, amax_reduction_group=dist.group.WORLD):
            y = layers(x)
        y.nan_to_num(0, 0, 0).sum().backward()
    return layers.state_dict(), te.numerics(layers)


def _apart(rank: int, algorithm: Any) -> list[tuple[float, float]]:
    """Scales of the input and of the gradient, with the amaxes reduced and each rank's own."""
    found = []
    for reduced in (True, False):
        layer = te.Linear(32, 16, device="cpu")
        for _ in range(2):  # the second time with the gradients of the first
            own = recipe.DelayedScaling(reduce_amax=reduced, amax_compute_algo=algorithm)
            with te.autocast(recipe=own, amax_reduction_group=dist.group.WORLD):
                y = layer(torch.full((4, 32), 1.0 + rank))
            y.backward(torch.full_like(y, 2.0 - rank))
        figures = te.numerics(layer)[""]
        found.append((figures["input"]["scale"], figures["grad_output"]["scale"]))
    return found


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


def _one_evaluates(rank: int) -> list[float]:
    """Scales of weights that multiply together, of which the second rank has the larger ones, after a step."""
    torch.manual_seed(0)
    model = Gated()
    nn.init.constant_(model.up_proj.weight, 0.5 + rank / 2)
    te.convert(model, parts=("linear", "mlp"))
    for training in (False, True)[rank:]:
        region = te.autocast(recipe=ASKED, amax_reduction_group=dist.group.WORLD if training else None)
        with torch.set_grad_enabled(training), region:
            y = model(torch.ones(4, 32))
        if training:
            y.sum().backward()
    return [figures["weight"]["scale"] for figures in te.numerics(model).values()]


def _one_is_gone(rank: int) -> list[float]:
    """Scales of the model that is left, after a step each: the first rank has collected the other one, the second not."""
    old, left = (nn.Sequential(te.Linear(32, 16, device="cpu")) for _ in range(2))
    found = []
    old.cycle = [old]
    gc.disable()
    for step in range(3):
        for model in (old, left):
            with te.autocast(recipe=ASKED, amax_reduction_group=dist.group.WORLD):
                model(torch.full((4, 32), 2.0 ** (step + rank)))
        old = model = left
        if rank == 0:
            gc.collect()
        found.append(te.numerics(left)["0"]["input"]["scale"])
    gc.enable()
    return found


@pytest.mark.slow
def test_ranks_agree_where_one_holds_a_deleted_model_as_garbage(ranks: Path) -> None:
    assert [torch.load(ranks / f"gone{rank}.pt") for rank in (0, 1)] == [[224.0, 112.0, 56.0]] * 2


@pytest.mark.slow
def test_ranks_share_scales_where_one_has_evaluated_alone(ranks: Path) -> None:
    first, second = (torch.load(ranks / f"evaluates{rank}.pt") for rank in (0, 1))
    assert len(first) == 3
    assert first == second


@pytest.mark.slow
def test_ranks_share_the_largest_amax(ranks: Path) -> None:
    for algorithm in ALGORITHMS:
        (first, numbers), (second, others) = (torch.load(ranks / f"{algorithm}{rank}.pt") for rank in (0, 1))
        for key in first:
            if "fp8_scale" in key:
                assert torch.equal(first[key], second[key]), key
            if "fp8_amax_history" in key:  # but for the row that has gathered since
                assert torch.equal(first[key][1:], second[key][1:]), key
        # NaN on one rank is a bad step on both.
        assert numbers["0"]["fc1.input"]["nonfinite_amax"] == others["0"]["fc1.input"]["nonfinite_amax"] == 1
        # The union's: the larger of both ranks' amaxes, 1 and 2 forward, 2 and 1 backward. And each its own.
        both = (224.0, 28672.0)
        assert [torch.load(ranks / f"{algorithm}-alone{rank}.pt") for rank in (0, 1)] == [
            [both, (448.0, 28672.0)],
            [both, (224.0, 57344.0)],
        ]


# ---- checkpoints


def _wrapped(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(te.LayerNormMLP(32, 48, device="cpu"), te.Linear(32, 16, device="cpu"))
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _another(kind: str) -> nn.Module:
    """A model that has scales to load: a pass without gradients leaves them fresh."""
    model = _wrapped(kind, 1)
    with torch.no_grad(), te.autocast(recipe=ASKED):
        model(torch.ones(8, 32))
    return model


def _train(model: nn.Module, steps: range, rank: int) -> list[Tensor]:
    """Losses of plain SGD."""
    losses = []
    for step in steps:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * step + rank)) * 2.0**step
        with te.autocast(recipe=ASKED, amax_reduction_group=dist.group.WORLD):
            loss = model(x).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 1e-3 * p.grad
        losses.append(loss.detach())
    return losses


def _scales(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items() if "fp8_scale" in name}


def _goes_on(kind: str, rank: int, path: Path) -> dict[str, Any]:
    """After three steps: the scales, the losses as they go on, and both as they are by way of each kind of state dict."""
    model = _wrapped(kind, 0)
    _train(model, range(3), rank)
    sharded = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    dcp.save({"model": sharded}, checkpoint_id=path / kind)
    found: dict[str, Any] = {"scales": _scales(sharded), "straight": _train(model, range(3, 6), rank)}
    del model

    other = _another(kind)
    set_model_state_dict(other, sharded)
    found["own"] = _train(other, range(3, 6), rank)
    del other

    other = _another(kind)
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full if rank == 0 else {}, options=everywhere)
    found["broadcast"] = _scales(get_model_state_dict(other))

    state = get_model_state_dict(_another(kind))
    dcp.load({"model": state}, checkpoint_id=path / kind)
    found["directory"] = _scales(state)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_distributed_checkpoint(kind: str, ranks: Path) -> None:
    both = [torch.load(ranks / f"{kind}{rank}.pt") for rank in (0, 1)]
    expected = both[0]["scales"]
    assert len(expected) == 4
    for found in both:
        assert all(torch.equal(a, b) for a, b in zip(found["own"], found["straight"], strict=True))
        for way in ("scales", "broadcast", "directory"):
            assert found[way].keys() == expected.keys()
            assert all(torch.equal(found[way][name], expected[name]) for name in expected), way


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # once for all ranks, as what a module imports
    te.Linear(32, 16, device="cpu")
    gc.collect()
    gc.freeze()  # each rank looks for garbage with each model: not among what is imported
    torch.multiprocessing.start_processes(_rank, (Path(sys.argv[1]),), nprocs=2, start_method="fork")
