"""Casting to FP8, bitwise against tables of all 256 codes written out from the formats' definition (no torch in them)."""

import itertools
import math

import numpy as np
import pytest
import torch
from fp8_tables import E4M3, E5M2, FORMATS, encode, table
from hypothesis import given, settings
from hypothesis import strategies as st

from te_bench.kernels.quantize import TENSOR, Layout, Operand
from te_bench.kernels.quantize.backends.reference import BACKEND, dequantize, scale_from_amax, widened


def nearest(x: float, values: list[tuple[float, int]]) -> int:
    """The code nearest to x, of two equally near ones the even one; beyond the largest, the largest."""
    distance = [abs(abs(x) - value) for value, _ in values]
    best = min(distance)
    codes = [code for (_, code), d in zip(values, distance, strict=True) if d == best]
    code = codes[0] if len(codes) == 1 else next(c for c in codes if c % 2 == 0)
    return code | (0x80 if math.copysign(1.0, x) < 0 else 0)


def slowly(x: np.ndarray, name: str) -> tuple[list[int], np.float32]:
    """codes, scale by scale = limit / amax in float32, one number at a time."""
    _, e, m, limit = FORMATS[name]
    amax = np.abs(x).max()
    with np.errstate(all="ignore"):
        scale = np.float32(limit) / np.float32(amax)
    if not (np.isfinite(amax) and amax > 0):
        scale = np.float32(1)
    scale = np.float32(min(scale, np.finfo(np.float32).max))
    values = table(e, m, limit)
    with np.errstate(all="ignore"):
        return [nearest(float(np.float32(value) * scale), values) for value in x], scale


def codes(data: torch.Tensor) -> list[int]:
    return [int(code) for code in data.view(torch.uint8).flatten()]


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    q = BACKEND.quantize(x.view(1, -1), dtype, rowwise=True, columnwise=False)
    return q.data[0], q.scale_inv


def operand(data: torch.Tensor, inverse: torch.Tensor) -> Operand:
    return Operand(data, inverse, Layout(data.dtype, TENSOR, torch.float32))


def test_the_tables_are_the_formats() -> None:
    for dtype, e, m, limit in FORMATS.values():
        values = table(e, m, limit)
        assert values[-1][0] == limit == torch.finfo(dtype).max
        assert values[1][0] == torch.finfo(dtype).smallest_normal / 2**m
        there = torch.tensor([code for _, code in values], dtype=torch.uint8).view(dtype).double()
        assert there.tolist() == [value for value, _ in values]


@pytest.mark.parametrize("name", FORMATS)
def test_every_boundary_between_two_numbers(name: str) -> None:
    """All midpoints, and the float32 just below and above each; an element of the format's maximum keeps the scale at 1."""
    dtype, e, m, limit = FORMATS[name]
    values = [value for value, _ in table(e, m, limit)]
    middles = np.array([(a + b) / 2 for a, b in itertools.pairwise(values)], dtype=np.float32)
    x = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9)), values])
    x = np.concatenate([x, -x, [limit]]).astype(np.float32)
    data, inverse = quantize(torch.from_numpy(x), dtype)
    expected, scale = slowly(x, name)
    assert scale == 1
    assert inverse.item() == 1
    assert codes(data) == expected


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=24))
def test_bitwise_against_the_table(name: str, numbers: list[float]) -> None:
    x = np.array(numbers, dtype=np.float32)
    data, inverse = quantize(torch.from_numpy(x), FORMATS[name][0])
    expected, scale = slowly(x, name)
    assert codes(data) == expected
    assert inverse == torch.tensor(scale).reciprocal()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_the_largest_becomes_the_largest(dtype: torch.dtype) -> None:
    for amax in (1e-30, 1e-3, 1.0, 447.9, 3e38):
        data, _ = quantize(torch.tensor([amax, -amax, 0.0]), dtype)
        assert data.float().tolist() == [torch.finfo(dtype).max, -torch.finfo(dtype).max, 0.0]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_an_amax_without_a_scale_gives_one(dtype: torch.dtype) -> None:
    for amax in (0.0, math.inf, math.nan):
        assert scale_from_amax(torch.tensor(amax), dtype).item() == 1
    data, inverse = quantize(torch.zeros(4), dtype)
    assert codes(data) == [0] * 4
    assert inverse.item() == 1
    data, inverse = quantize(torch.tensor([math.inf, -math.inf, 2.0]), dtype)
    limit = torch.finfo(dtype).max
    assert data.float().tolist() == [limit, -limit, 2.0]
    assert inverse.item() == 1
    data, inverse = quantize(torch.tensor([math.nan, 2.0, 1e9]), dtype)
    assert data.float().isnan().tolist() == [True, False, False]
    assert data.float()[1:].tolist() == [2.0, limit]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_an_amax_so_small_that_the_scale_overflows(dtype: torch.dtype) -> None:
    """limit / 1e-38 is beyond float32: the scale stays at the largest float32 and nothing becomes infinite or NaN."""
    tiny = torch.tensor([1e-38, -1e-40, 0.0])
    assert scale_from_amax(tiny.abs().amax(), dtype).item() == torch.finfo(torch.float32).max
    data, inverse = quantize(tiny, dtype)
    assert data.float().isfinite().all()
    assert inverse.item() > 0
    assert dequantize(operand(data, inverse))[0].item() == pytest.approx(1e-38, rel=0.15)


def test_powers_of_two_are_rounded_down() -> None:
    amax = torch.tensor([448.0, 449.0, 224.0, 447.0, 3e38, 1e-38, 1e-45, 0.0, math.inf, math.nan])
    expected = [1.0, 0.5, 2.0, 1.0, 2.0 ** math.floor(math.log2(448 / 3e38)), 2.0**127, 2.0**127, 1.0, 1.0, 1.0]
    assert scale_from_amax(amax, E4M3, power_of_two=True).tolist() == expected


@pytest.mark.parametrize("name", FORMATS)
def test_the_tables_fast_encoder_is_the_slow_one(name: str) -> None:
    _, e, m, limit = FORMATS[name]
    values = table(e, m, limit)
    middles = [(a + b) / 2 for (a, _), (b, _) in itertools.pairwise(values)]
    x = np.array([v for v, _ in values] + middles + list(np.random.default_rng(0).normal(size=200) * 30) + [1e9, 0.0])
    x = np.concatenate([x, -x])
    assert encode(x, name).tolist() == [nearest(float(v), values) for v in x]


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_is_widened_to_what_it_stands_for(name: str) -> None:
    """With a NaN among them and without, transposed too, and where small float32 numbers count as zero."""
    dtype, e, m, limit = FORMATS[name]
    positive = torch.tensor([value for value, _ in table(e, m, limit)])
    numbers = torch.cat([positive, -positive])
    data = torch.tensor([code | sign for sign in (0, 0x80) for _, code in table(e, m, limit)], dtype=torch.uint8)
    both = data.view(dtype).view(2, -1)
    assert torch.equal(widened(both), numbers.view(2, -1))
    assert torch.equal(widened(both).signbit(), numbers.view(2, -1).signbit())  # of the zeros, too
    assert torch.equal(widened(both.t()), numbers.view(2, -1).t())
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(widened(both), numbers.view(2, -1))
    finally:
        torch.set_flush_denormal(False)
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    torch.testing.assert_close(widened(every), every.float(), rtol=0, atol=0, equal_nan=True)
    assert widened(every[:0]).shape == (0,)
