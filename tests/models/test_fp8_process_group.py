"""Amaxes shared over a process group: every rank casts by the same scales."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import te_bench.models as te
from te_bench.models import recipe

ALGORITHMS = ("max", "most_recent")


def _rank(rank: int, path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    try:
        for algorithm in ALGORITHMS:
            torch.save(_together(rank, algorithm), path / f"{algorithm}{rank}.pt")
            torch.save(_apart(rank, algorithm), path / f"{algorithm}-alone{rank}.pt")
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


@pytest.mark.slow
def test_ranks_share_the_largest_amax(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, (tmp_path,), nprocs=2)  # once for all: torch's import takes longest
    for algorithm in ALGORITHMS:
        (first, numbers), (second, others) = (torch.load(tmp_path / f"{algorithm}{rank}.pt") for rank in (0, 1))
        for key in first:
            if "fp8_scale" in key:
                assert torch.equal(first[key], second[key]), key
            if "fp8_amax_history" in key:  # but for the row that has gathered since
                assert torch.equal(first[key][1:], second[key][1:]), key
        # NaN on one rank is a bad step on both.
        assert numbers["0"]["fc1.input"]["nonfinite_amax"] == others["0"]["fc1.input"]["nonfinite_amax"] == 1
        # The union's: the larger of both ranks' amaxes, 1 and 2 forward, 2 and 1 backward. And each its own.
        both = (224.0, 28672.0)
        assert [torch.load(tmp_path / f"{algorithm}-alone{rank}.pt") for rank in (0, 1)] == [
            [both, (448.0, 28672.0)],
            [both, (224.0, 57344.0)],
        ]
