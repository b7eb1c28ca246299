"""What an FP8 GEMM must pass, as functions, so that broken GEMMs can be shown to fail it."""

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from te_bench.kernels import quantize
from te_bench.kernels.gemm import Problem

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMATS = [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")]

# Beyond what rounding D costs: float32 sums in another order, and the tensor core's 14-bit sums of 128 products or of
# all K (2^-13 of the largest product, a tenth of a percent of the sum).
FLOAT32, PROMOTED, FAST = 1e-6, 5e-4, 2e-3


def floor(name: str, device: str, fast_accum: bool) -> float:
    """The part of the largest product that the backend's sums may be off by."""
    if device == "cpu" or name == "reference":
        return FLOAT32
    return FAST if fast_accum else PROMOTED


class Operands(NamedTuple):
    a: Tensor
    b: Tensor
    a_scale_inv: Tensor
    b_scale_inv: Tensor


def a_problem(shape: tuple[int, int, int], formats: tuple[str, str], pair: tuple[str, str], device: str) -> Problem:
    capability = torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else None
    return Problem(
        m=shape[0],
        n=shape[1],
        k=shape[2],
        a_dtype=formats[0],
        b_dtype=formats[1],
        device=device,
        capability=capability,
        a_granularity=pair[0],
        b_granularity=pair[1],
    )


def draw(shape: tuple[int, int, int], device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Normal a (M, K) and b (N, K), the rows of each of sizes between 1/4 and 4, so that a wrong row's scale shows."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m * n + k + seed)
    matrices = [torch.randn(rows, k, generator=generator) for rows in (m, n)]
    sizes = [2 ** (4 * torch.rand(rows, 1, generator=generator) - 2) for rows in (m, n)]
    a, b = (x * size for x, size in zip(matrices, sizes, strict=True))
    return a.to(device), b.to(device)


def cast(x: Tensor, dtype: torch.dtype, granularity: str) -> tuple[Tensor, Tensor]:
    """data, scale_inv by the plain quantiser."""
    backend = quantize.load("reference")
    if granularity in ("tensor", "row"):
        packed = getattr(backend, granularity)(x, dtype, rowwise=True, columnwise=False)
    else:
        rows = {"block": 1, "tile": quantize.BLOCK}[granularity]
        packed = backend.block(x, dtype, rows=rows, rowwise=True, columnwise=False, power_of_two=False)
    return packed.data, packed.scale_inv


def quantised(a: Tensor, b: Tensor, formats: tuple[str, str], pair: tuple[str, str]) -> Operands:
    (a, a_inv), (b, b_inv) = (cast(x, DTYPES[f], g) for x, f, g in zip((a, b), formats, pair, strict=True))
    return Operands(a, b, a_inv, b_inv)


def integers(shape: tuple[int, int, int], pair: tuple[str, str], device: str = "cpu") -> Operands:
    """Integers from -2 to 2 and scales that are powers of two: every sum is exact, even in 14 bits."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m * n + k)
    data = [torch.randint(-2, 3, (rows, k), generator=generator).to(DTYPES["e4m3"]).to(device) for rows in (m, n)]
    blocks = math.ceil(k / 128)
    scales = []
    for rows, granularity in zip((m, n), pair, strict=True):
        sizes = {"tensor": (), "row": (rows,), "block": (rows, blocks), "tile": (math.ceil(rows / 128), blocks)}
        scales.append((2.0 ** torch.randint(-1, 2, sizes[granularity], generator=generator)).to(device))
    return Operands(*data, *scales)


def dequantised(data: Tensor, scale_inv: Tensor) -> Tensor:
    """data * scale_inv in float64, element by element."""
    rows, k = data.shape
    scale = scale_inv.double()
    if scale.dim() == 1:
        scale = scale[:, None]
    elif scale.dim() == 2:
        row_of = torch.arange(rows, device=data.device) // (1 if scale.shape[0] == rows else 128)
        scale = scale[row_of][:, torch.arange(k, device=data.device) // 128]
    return data.double() * scale


def product(operands: Operands, bias: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """D of the dequantised operands, computed in `dtype`."""
    a, b = (dequantised(*x).to(dtype) for x in (operands[::2], operands[1::2]))
    out = a @ b.t()
    return out if bias is None else out + bias.to(dtype)


def check(out: Tensor, operands: Operands, *, out_dtype: torch.dtype, floor: float, bias: Tensor | None = None) -> None:
    """AssertionError unless D's error, in the mean and at its worst, is <= 2 x float32's, rounded, + floor."""
    truth = product(operands, bias)
    library = product(operands, bias, torch.float32).to(out_dtype)
    assert out.dtype == out_dtype, f"{out.dtype} instead of {out_dtype}"
    assert out.shape == truth.shape, f"{tuple(out.shape)} instead of {tuple(truth.shape)}"
    for name, size in (("mean", torch.linalg.vector_norm), ("largest", lambda x: x.abs().max())):
        ours, theirs = (((size(x.double() - truth)) / size(truth)).item() for x in (out, library))
        assert ours <= 2 * theirs + floor, f"{name} error {ours:.2e} > 2 x {theirs:.2e} + {floor:.0e}"


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
