"""What an FP8 GEMM must pass, as functions, so that broken GEMMs can be shown to fail it."""

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from te_bench.kernels import quantize
from te_bench.kernels.gemm import Problem
from te_bench.kernels.gemm.operands import BLOCKS, DTYPES
from te_bench.kernels.quantize import Layout, Operand
from te_bench.kernels.quantize.backends.reference import spread

FORMATS = [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")]
# Not test_schema, which multiplies FP8 tensors.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")

# Beyond what rounding D costs: float32 sums in another order, and the tensor core's 14-bit sums of 128 products or of
# all K (2^-13 of the largest product, a tenth of a percent of the sum).
FLOAT32, PROMOTED, FAST = 1e-6, 5e-4, 2e-3


def floor(name: str, device: str, fast_accum: bool) -> float:
    """The part of the largest product that the backend's sums may be off by."""
    if device == "cpu" or name == "reference":
        return FLOAT32
    return FAST if fast_accum else PROMOTED


class Operands(NamedTuple):
    a: Operand
    b: Operand


def layout(name: str, granularity: str) -> Layout:
    return Layout(DTYPES[name], BLOCKS[granularity], torch.float32)


def a_problem(shape: tuple[int, int, int], formats: tuple[str, str], pair: tuple[str, str], device: str) -> Problem:
    capability = torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else None
    (m, n, k), (a, b) = shape, (layout(*each) for each in zip(formats, pair, strict=True))
    return Problem(m=m, n=n, k=k, a=a, b=b, device=device, capability=capability)


def draw(shape: tuple[int, int, int], device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Normal a (M, K) and b (N, K), the rows of each of sizes between 1/4 and 4, so that a wrong row's scale shows."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m * n + k + seed)
    matrices = [torch.randn(rows, k, generator=generator) for rows in (m, n)]
    sizes = [2 ** (4 * torch.rand(rows, 1, generator=generator) - 2) for rows in (m, n)]
    a, b = (x * size for x, size in zip(matrices, sizes, strict=True))
    return a.to(device), b.to(device)


def cast(x: Tensor, dtype: torch.dtype, granularity: str) -> Operand:
    """By the plain quantiser."""
    block = quantize.BLOCKS[granularity]
    return quantize.load("reference").quantize(x, dtype, block, rowwise=True, columnwise=False).by_rows()


def quantised(a: Tensor, b: Tensor, formats: tuple[str, str], pair: tuple[str, str]) -> Operands:
    return Operands(*(cast(x, DTYPES[f], g) for x, f, g in zip((a, b), formats, pair, strict=True)))


def integers(shape: tuple[int, int, int], pair: tuple[str, str], device: str = "cpu") -> Operands:
    """Integers from -2 to 2 and scales that are powers of two: every sum is exact, even in 14 bits."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m * n + k)
    made = []
    for rows, granularity in zip((m, n), pair, strict=True):
        of = layout("e4m3", granularity)
        data = torch.randint(-2, 3, (rows, k), generator=generator).to(of.format)
        scale_inv = 2.0 ** torch.randint(-1, 2, of.scale_shape(rows, k), generator=generator)
        made.append(Operand(data.to(device), scale_inv.to(device), of))
    return Operands(*made)


def product(operands: Operands, bias: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """D of the dequantised operands, computed in `dtype`."""
    a, b = ((x.data.double() * spread(x).double()).to(dtype) for x in operands)
    out = a @ b.t()
    return out if bias is None else out + bias.to(dtype)


def check(out: Tensor, operands: Operands, *, out_dtype: torch.dtype, floor: float, bias: Tensor | None = None) -> None:
    """AssertionError unless D's error, in the mean and at its worst, is <= 2 x float32's, rounded, + floor."""
    truth = product(operands, bias)
    library = product(operands, bias, torch.float32).to(out_dtype)
    assert out.dtype == out_dtype, f"{out.dtype} instead of {out_dtype}"
    assert out.shape == truth.shape, f"{tuple(out.shape)} instead of {tuple(truth.shape)}"
    close("D", out, library, truth, floor)


def close(name: str, out: Tensor, library: Tensor, truth: Tensor, floor: float) -> None:
    for kind, size in (("mean", torch.linalg.vector_norm), ("largest", lambda x: x.abs().max())):
        ours, theirs = (((size(x.double() - truth)) / size(truth)).item() for x in (out, library))
        assert ours <= 2 * theirs + floor, f"{name}: {kind} error {ours:.2e} > 2 x {theirs:.2e} + {floor:.0e}"


def decibels(out: Tensor, truth: Tensor) -> float:
    return -20 * math.log10(((out.double() - truth).norm() / truth.norm()).item())


def theory(formats: tuple[str, str], scaled: tuple[int, int]) -> float:
    """Signal to quantisation noise, dB, of a product of normal operands with `scaled` elements under each scale.

    The noise of an operand is the integral over the normal distribution of (x - round(x * s) / s)^2, the format's own
    rounding, with s = FP8_MAX / amax, averaged over the distribution of the amax of that many normals. The relative noise
    powers of a product's operands, independent, add up: na + nb + na * nb.
    """
    na, nb = (_noise(f, n) for f, n in zip(formats, scaled, strict=True))
    return -10 * math.log10(na + nb + na * nb)


def _noise(name: str, count: int, levels: int = 64, points: int = 2000) -> float:
    mantissa, exponent, largest = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}[name]

    def error(x: "np.typing.NDArray[np.float64]", scale: float) -> float:
        steps = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(x * scale))), exponent) - mantissa)
        return float(np.mean((x - np.rint(x * scale / steps) * steps / scale) ** 2))

    middles = (np.arange(points) + 0.5) / points
    total = 0.0
    for level in (np.arange(levels) + 0.5) / levels:  # quantiles of the amax
        amax = stats.norm.isf((1 - level ** (1 / count)) / 2)
        below = stats.norm.ppf(stats.norm.cdf(-amax) + middles * (1 - 2 * stats.norm.sf(amax)))
        total += error(below, largest / amax) * (count - 1) / count  # the amax itself has no error
    return total / levels
