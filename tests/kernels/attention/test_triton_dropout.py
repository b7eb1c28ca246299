"""Dropout of our Triton attention: by the seed and the place alone, and the same in both passes."""

import itertools
import math

import pytest
import torch
from test_contract import gradients
from test_triton import DEVICES, assert_close, band, drawn
from torch import Tensor

from te_bench.kernels.attention.backends import triton as ours
from te_bench.kernels.attention.portable import forward as _kernels
from te_bench.kernels.attention.portable.forward import Extent
from te_bench.kernels.attention.portable.launch import Tile

# Dropout


def weights_of(seed: Tensor, dropout: float, rows: int, keys: int, tile: Tile | None = None) -> Tensor:
    """(2, 2, rows, keys): what dropout leaves of equal weights, times keys: 0 or 1 / (1 - dropout)."""
    q = torch.zeros(2, 2, rows, 16, device=seed.device)
    v = torch.eye(keys, device=seed.device).expand(2, 2, keys, keys)
    dtype = torch.float32 if seed.device.type == "cpu" else torch.float16
    k = torch.zeros(2, 2, keys, 16, device=seed.device)
    out, _ = _kernels.forward(
        q.to(dtype), k.to(dtype), v.to(dtype).contiguous(), Extent(-1, -1, None), 1.0, dropout, seed, tile
    )
    return out.float() * keys


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_depends_on_the_seed_and_the_place_and_on_nothing_else(device: str) -> None:
    seed = torch.tensor([12345678901234, 77], device=device)
    usual = weights_of(seed, 0.25, 64, 64)
    values = usual.unique()
    assert values.numel() == 2
    torch.testing.assert_close(values, torch.tensor([0.0, 4 / 3], device=device), rtol=1e-3, atol=0)
    rate = (usual == 0).float().mean().item()
    assert abs(rate - 0.25) < 4 * math.sqrt(0.25 * 0.75 / usual.numel())
    assert torch.equal(usual, weights_of(seed, 0.25, 64, 64, Tile(32, 16, 4, 1)))
    dropped = usual == 0
    others = [
        weights_of(torch.tensor(pair, device=device), 0.25, 64, 64) == 0 for pair in ((12345678901234, 78), (5, 77))
    ]
    heads = [
        dropped[0, 0],
        dropped[0, 1],
        dropped[1, 0],
        dropped[1, 1],
        dropped[0, 0].mT,
        others[0][0, 0],
        others[1][0, 0],
    ]
    for a, b in itertools.combinations(heads, 2):  # independent: they differ in 2 p (1 - p) of the places
        assert abs((a != b).float().mean().item() - 0.375) < 0.05
    for shift in (1, 2, 4, 8, 16, 32):
        for dim in (2, 3):
            assert abs((dropped != dropped.roll(shift, dim)).float().mean().item() - 0.375) < 0.02
    assert not weights_of(seed, 1.0, 16, 16).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [(-1, -1), (40, 3), (-1, 7)], ids=str)
def test_the_backward_pass_drops_what_the_forward_pass_dropped(window: tuple[int, int], device: str) -> None:
    """Against autograd through float64 weights times the mask that the kernel made."""
    seed = torch.tensor([99, 1 << 40], device=device)
    rows, keys, scale = 150, 128, 0.25  # whole blocks between those that a window or the last rows cut
    tensors = drawn(device, (2, 2, rows, 64), (2, 2, keys, 64), (2, 2, keys, 64), (2, 2, rows, 64))
    stays = weights_of(seed, 0.3, rows, keys).double()

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (scale * q @ k.mT).masked_fill(band(rows, keys, *window).to(device), -math.inf)
        return (scores.softmax(-1) * stays) @ v

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours.attend_by_kernels((q, k, v, None, seed, None, None), (*window, scale, 0.3, 0, 0))[0]

    assert_close(gradients(forward, tensors), gradients(definition, tensors, torch.float64), device)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_follows_torchs_generator(device: str) -> None:
    q, k, v = drawn(device, *[(1, 1, 32, 16)] * 3)
    made = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        made.append(ours.forward(q, k, v, causal=False, scale=1.0, dropout=0.5))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
