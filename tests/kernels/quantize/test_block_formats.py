"""MXFP8 and NVFP4: published vectors bit for bit, extremes by the rules, stochastic rounding and transform by theory.

Every value is checked in the plain reference; Triton's kernels are held to that, bit for bit.
"""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_checks import DEVICES, WithoutHostTensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_bench.kernels.quantize import (
    NONFINITE,
    SATURATED,
    UNDERFLOWED,
    Quantized,
    block_casts,
    block_formats,
    block_kernels,
)
from te_bench.kernels.quantize.block_formats import Elements, e2m1, hadamard, mxfp8_elements, nvfp4_elements

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "blackwell_vectors.json").read_text())
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BOTH = {"rowwise": True, "columnwise": True}


def floats(bits: list[str], length: int | None = None) -> Tensor:
    """float32 of bit patterns, and zeros up to a length."""
    values = torch.tensor([int(b, 16) for b in bits]).to(torch.int32).view(torch.float32)
    return torch.nn.functional.pad(values, (0, (length or len(bits)) - len(bits)))


def bf16(bits: str) -> Tensor:
    return floats([bits[i : i + 4] + "0000" for i in range(0, len(bits), 4)])


def e2m1_codes(values: Tensor) -> list[int]:
    """The four bits of E2M1 values."""
    return ((values.abs()[..., None] == GRID).int().argmax(-1) + 8 * values.signbit()).flatten().tolist()  # type: ignore[no-any-return]


def e4m3_codes(values: Tensor) -> list[int]:
    return values.to(E4M3).view(torch.uint8).flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("vector", VECTORS["mxfp8"], ids=lambda vector: vector["name"])
def test_published_mxfp8_blocks(vector: dict[str, Any]) -> None:
    found = mxfp8_elements(floats(vector["in"], 32).view(1, 32))
    assert found.scales.item() == vector["scale"]
    assert e4m3_codes(found.values)[: len(vector["in"])] == [int(code, 16) for code in vector["codes"]]


@pytest.mark.parametrize("vector", VECTORS["nvfp4"], ids=lambda vector: vector["name"])
def test_published_nvfp4_blocks(vector: dict[str, Any]) -> None:
    amax = floats([vector["global_amax"]])[0]
    found = nvfp4_elements(floats(vector["in"], 16).view(1, 16), amax)
    assert e4m3_codes(found.scales) == [int(vector["scale"], 16)]
    assert e2m1_codes(found.values)[: len(vector["in"])] == [int(code, 16) for code in vector["codes"]]


def test_a_published_square_block() -> None:
    vector = VECTORS["w2d_16x16"]
    values = torch.stack([bf16(row) for row in vector["in_bf16"]])
    found = nvfp4_elements(values, floats([vector["global_amax"]])[0])
    assert e4m3_codes(found.scales) == [int(vector["scale"], 16)]
    assert "".join(f"{code:x}" for code in e2m1_codes(found.values)) == "".join(vector["codes"])


def test_published_stochastic_roundings() -> None:
    scaled, random, codes = zip(*VECTORS["sr_software_rule"]["rows"], strict=True)
    assert e2m1_codes(e2m1(floats(scaled), torch.tensor(random).float())) == list(codes)


def test_published_transforms_and_alphas() -> None:
    for row in VECTORS["rht16"]["rows"]:
        assert torch.equal(hadamard(bf16("".join(row["in_bf16"]))), bf16("".join(row["out_bf16"])))
    for a, b, expected, _ in VECTORS["gemm_alpha"]["rows"]:
        scale_inv = [floats([bits])[0].double() / 2688 for bits in (a, b)]
        assert torch.equal(block_formats.alpha(*scale_inv), floats([expected])[0])


def test_philox_is_random123_s() -> None:
    words = [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]  # Random123's known answer, of a key and a counter of zeros
    expected = [word >> shift & 0xFF for word in words for shift in (0, 8, 16, 24)]
    assert block_formats.random_bytes(torch.tensor(0), 1, 0).int().tolist() == [expected]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_mxfp8_scale_is_the_power_of_two_above_amax_over_the_largest(dtype: torch.dtype) -> None:
    limit, powers = torch.finfo(dtype).max, torch.arange(-100, 90)
    for factor, more in ((1.0, 0), (1.0 + 2.0**-23, 1), (0.5 + 2.0**-24, 0)):
        amax = (limit * factor * torch.exp2(powers.double())).float()
        found = mxfp8_elements(torch.stack([amax, amax / 3], -1)[:, None], dtype)
        assert torch.equal(found.scales.long(), 127 + powers + more)
        assert (found.values[..., 0] == limit).all() == (factor == 1)


def test_extremes_of_mxfp8() -> None:
    v = torch.zeros(5, 32)
    v[1, :2] = torch.tensor([math.nan, 448.0])
    v[2, :2] = torch.tensor([-math.inf, 1.0])
    v[3, 0] = 2.0**-149
    v[4, :2] = torch.tensor([-0.0, 2.0**-140])
    q = block_formats.mxfp8(v, E4M3, **BOTH).data.float()
    assert not q[0].any()
    assert q[1, 0].isnan()
    assert q[1, 1:].tolist() == [448.0] + [0.0] * 30  # NaN is one bad element
    assert q[2, 0] == -math.inf  # 448 x 2^127
    assert q[2, 1] == 0
    assert q[3, 0] == 0
    assert q[4].signbit().tolist() == [True] + [False] * 31


def test_midpoints_of_e2m1_go_to_the_even_code() -> None:
    ties, even = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), torch.tensor([0.0, 1, 1, 2, 2, 4, 4])
    assert torch.equal(e2m1(ties), even)
    assert torch.equal(e2m1(-ties), -even)
    for nudge, expected in ((-1, GRID[:-1]), (1, GRID[1:])):
        assert torch.equal(e2m1(ties.nextafter(torch.tensor(nudge * math.inf))), expected)
    beyond = torch.tensor([6.375, -1e30, math.inf, -math.inf, math.nan, -0.0])
    assert e2m1_codes(e2m1(beyond)) == [7, 15, 7, 15, 7, 8]


def test_extremes_of_nvfp4() -> None:
    """A block of zeros, one whose scale underflows, an amax at which 2688 / amax is infinite, and infinity."""
    v = torch.zeros(3, 16)
    v[0, 0], v[1, :2] = 2688.0, torch.tensor([0.005859375, -1e-4])  # s = 2^-10, half of the smallest: to 0
    q = block_formats.nvfp4(v, rowwise=True, columnwise=False)
    assert q.scale_inv == 1
    assert q.data[0, 0] == 2688
    assert not q.data[1:].any()
    assert e2m1_codes(nvfp4_elements(v[1:2], v.max()).values)[:2] == [7, 15]
    for amax in (1e-40, math.inf):
        v = torch.zeros(1, 16)
        v[0, :2] = torch.tensor([amax, 1e-41])
        q = block_formats.nvfp4(v, rowwise=True, columnwise=False)
        assert q.data.isfinite().all()
    assert q.data[0, 0] == 6 * 448
    assert q.scale_inv == math.inf
    empty = block_formats.nvfp4(torch.zeros(0, 32), rowwise=True, columnwise=True)
    assert (empty.data.shape, empty.data_t.shape) == ((0, 32), (32, 0))


def test_counts_are_of_x() -> None:
    x = torch.ones(4, 32)
    x[0, :3] = torch.tensor([math.nan, math.inf, 0.0])
    x[1, 1] = 1e-9
    counts = torch.zeros(3, dtype=torch.int64)
    block_casts.mxfp8(x, E4M3, **BOTH, counts=counts)
    assert counts.tolist() == [0, 1 + 29, 2]  # beside infinity ones vanish
    counts.zero_()
    block_casts.nvfp4(
        torch.ones(4, 32).index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(1e-9)), **BOTH, counts=counts
    )
    assert counts[[UNDERFLOWED, NONFINITE]].tolist() == [1, 0]
    block_casts.nvfp4(torch.randn(64, 32), **BOTH, counts=counts)
    assert counts[SATURATED] > 0  # E4M3 rounds a block's scale up and down: half of the largest elements are above 6


def test_stochastic_rounding_has_the_mean_of_what_it_rounds() -> None:
    """By five standard errors of 4096 draws of each of 64 numbers; rounding to the nearest fails it by a hundred."""
    values = torch.linspace(-6, 6, 64).repeat(4096, 1)
    random = block_formats.random_bytes(torch.tensor(7), values.numel() // 16, 0).view_as(values)
    found = e2m1(values, random)
    sizes = values[0].abs()
    step = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    allowed = step * (5 * 0.5 / 64 + 1 / 256)  # a byte's mean is half of 1/256 below its range's
    assert ((found.mean(0) - values[0]).abs() < allowed).all()
    assert ((found - values).abs() <= step).all()
    assert ((e2m1(values).mean(0) - values[0]).abs() > allowed).any()


def test_a_seed_rounds_the_same_and_another_seed_and_orientation_otherwise() -> None:
    x = torch.randn(64, 64)
    first, again, other = (block_casts.nvfp4(x, **BOTH, seed=torch.tensor(seed)) for seed in (3, 3, 2**62))
    assert torch.equal(first.data, again.data)
    assert torch.equal(first.data_t, again.data_t)
    assert (first.data != other.data).float().mean() > 0.1
    symmetric = x + x.t()
    nearest, rounded = (block_casts.nvfp4(symmetric, **BOTH, seed=seed) for seed in (None, torch.tensor(3)))
    assert torch.equal(nearest.data, nearest.data_t)
    assert not torch.equal(rounded.data, rounded.data_t)


def test_the_transform_is_orthogonal_and_cancels_in_a_product() -> None:
    matrix = hadamard(torch.eye(16)).double()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64))
    a, b = (torch.randint(-8, 8, (12, 48)).double() for _ in range(2))  # a sixteenth of such sums is exact in bf16

    def turned(x: Tensor) -> Tensor:
        return hadamard(x.float().unflatten(1, (-1, 16))).flatten(1).double()

    assert torch.equal(turned(a) @ turned(b).t(), a @ b.t())
    assert not torch.allclose(turned(a) @ b.t(), a @ b.t(), rtol=0.1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 64), (50, 72)])
def test_kernels_are_the_reference_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.logspace(-2, 2, shape[0])[:, None]
    x[0, 3], x[1, 1], x[:33, 5], x[2] = 0, -0.0, 0, 2.0**-20
    x[7, 7] = math.nan
    x[40, :3] = torch.tensor([448.0, 57344.0, 6.0]) if dtype != torch.float16 else 448.0
    x = x.to(dtype).to(device)
    for target in (E4M3, E5M2):
        for rows in (1, 32):
            same(
                block_kernels.mxfp8(x, target, rows, True, True),
                block_formats.mxfp8(x, target, rows=rows, **BOTH),
                rows,
            )
    seed = torch.tensor(-1234567890123456789, device=device)
    for rows, transform, given in (
        (1, False, None),
        (16, False, None),
        (1, True, None),
        (1, True, seed),
        (1, False, seed),
    ):
        made = block_kernels.nvfp4(x, rows, True, True, transform, given)
        expected = block_formats.nvfp4(x, rows=rows, **BOTH, transform=transform, seed=given)
        same(made[:2], expected, rows)
        assert made[2] == expected.scale_inv
        assert rows > 1 or made[3] == expected.scale_inv_t


def same(made: tuple[Tensor | None, ...], expected: Quantized, rows: int) -> None:
    data, columns = made
    for ours, right in ((data, expected.data), (data if rows > 1 else columns, expected.data_t.t())):
        assert ours is not None
        assert torch.equal(*(torch.where(x.isnan(), 1.0, x).contiguous().view(torch.int16) for x in (ours, right)))
        assert torch.equal(ours.isnan(), right.isnan())


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_round_published_blocks_as_published(device: str) -> None:
    """Each beside a block with the tensor's amax."""
    for vector in VECTORS["nvfp4"]:
        amax, v = floats([vector["global_amax"]]), floats(vector["in"], 16)
        x = torch.cat([v, amax, torch.zeros(15)])[None].to(device)
        data, *_ = block_kernels.nvfp4(x, 1, True, False, False, None)
        expected = nvfp4_elements(v[None], amax[0])
        assert data is not None
        assert torch.equal(data[0, :16].float().cpu(), (expected.values * expected.scales).flatten()), vector["name"]
    blocks = torch.stack([floats(vector["in"], 32) for vector in VECTORS["mxfp8"]]).to(device)
    right = block_formats.mxfp8(blocks, E4M3, **BOTH)
    if device == "cpu":  # Triton's interpreter writes subnormal bf16 as 0 (3.7)
        tiny = torch.finfo(torch.bfloat16).smallest_normal
        data, data_t = (torch.where(x.abs() < tiny, 0 * x, x) for x in (right.data, right.data_t))
        right = right._replace(data=data, data_t=data_t)
    same(block_kernels.mxfp8(blocks, E4M3, 1, True, True), right, 1)


@pytest.mark.parametrize("layouts", [(True, True), (False, True), (True, False)])
def test_operators_are_what_they_declare(layouts: tuple[bool, bool]) -> None:
    x, counts, seed = torch.randn(33, 40), torch.zeros(3, dtype=torch.int64), torch.tensor(5)
    nvfp4, mxfp8 = torch.ops.te_bench.nvfp4_cast.default, torch.ops.te_bench.mxfp8_cast.default
    cases = [(mxfp8, (E4M3, rows, *layouts, False, counts)) for rows in (1, 32)]
    cases += [(nvfp4, (16, *layouts, False, None, False, None)), (nvfp4, (1, *layouts, True, seed, True, counts))]
    for operator, given in cases:
        torch.library.opcheck(operator, (x, *given), test_utils=("test_schema", "test_faketensor"))


def test_a_cast_that_counts_can_be_captured() -> None:
    """Plain PyTorch counts, on a GPU, too."""
    x, counts, seed = torch.randn(33, 40), torch.zeros(3, dtype=torch.int64), torch.tensor(5)
    with WithoutHostTensors():
        block_formats.mxfp8(x, E4M3, **BOTH, counts=counts)
        block_formats.nvfp4(x, **BOTH, transform=True, seed=seed, counts=counts)
    assert counts.any()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"rows": 3}, "rows 3: 1, for activations and gradients, or 16, for weights"),
        ({"rows": 16, "transform": True}, "rows 16: neither transformed nor rounded stochastically"),
        ({"rowwise": False, "columnwise": False}, "ask for at least one layout"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_impossible_is_said(asked: dict[str, Any], reason: str, device: str) -> None:
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():  # a GPU's tensors, without a GPU
        x = torch.empty(16, 16, device=device)
        with pytest.raises(ValueError, match=reason):
            block_casts.nvfp4(x, **{**BOTH, **asked})
        with pytest.raises(ValueError, match="must be"):
            block_casts.mxfp8(torch.empty(16, device=device), E4M3, **BOTH)
        with pytest.raises(ValueError, match="dtype torch"):
            block_casts.mxfp8(x, torch.uint8, **BOTH)


def test_elements_times_scales_are_what_a_cast_gives() -> None:
    x = torch.randn(32, 48)
    values, codes = mxfp8_elements(x[:, :32].reshape(32, 1, 32))
    made = values.flatten(1) * torch.exp2(codes.float() - 127)[:, None]
    assert torch.equal(block_formats.mxfp8(x, E4M3, rowwise=True, columnwise=False).data[:, :32].float(), made)
    found: Elements = nvfp4_elements(x.view(32, 3, 1, 16), x.abs().max())
    made = (found.values * found.scales[..., None, None]).view(32, 48)
    assert torch.equal(block_formats.nvfp4(x, rowwise=True, columnwise=False).data.float(), made)
