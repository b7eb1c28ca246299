"""Check the operands of FP8 GEMMs: supported layouts and fitting tensors; convert them for torch's operators."""

import torch
from torch import Tensor

from te_bench.kernels.gemm import PAIRS
from te_bench.kernels.quantize import BLOCKS, GRANULARITIES, PLAIN, Layout, Operand

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

Flat = tuple[Tensor, Tensor, Tensor, Tensor, str, str]
"""Data and scale_inv of a and b, alternating, and what shares a scale of each."""


def refusal(a: Layout, b: Layout) -> str | None:
    """Return why FP8 GEMMs do not support operands of these layouts, or None."""
    for layout in (a, b):
        known = layout.format in DTYPES.values() and layout.block in GRANULARITIES
        if not known or layout.scales is not torch.float32 or layout.order != PLAIN:
            return (
                f"{layout} is none that FP8 GEMMs multiply: E4M3 or E5M2 with float32 scales per tensor, row, 1 x 128 or "
                f"128 x 128, in the order {PLAIN!r}; another one is for the `gemm` of the recipe that made it"
            )
    pair = GRANULARITIES[a.block], GRANULARITIES[b.block]
    if pair in PAIRS:
        return None
    possible = ", ".join(" x ".join(legal) for legal in PAIRS)
    return f"scales per {pair[0]} x {pair[1]} cannot be multiplied; possible are {possible}"


def granularities(a: Layout, b: Layout) -> tuple[str, str]:
    """Return what shares a scale in each: "tensor", "row", "block" or "tile". Raises ValueError if unsupported."""
    if reason := refusal(a, b):
        raise ValueError(reason)
    return GRANULARITIES[a.block], GRANULARITIES[b.block]


def check(a: Operand, b: Operand, bias: Tensor | None = None) -> tuple[str, str]:
    """Return `granularities` of both. Also raises ValueError for data, scales or a bias that do not fit."""
    pair = granularities(a.layout, b.layout)
    _check_formats(a, b)
    for name, x in (("a", a), ("b", b)):
        if x.data.dim() != 2 or not x.data.is_contiguous():
            raise _wrong_data(name, x)
    (_, k), (n, b_k) = a.data.shape, b.data.shape
    if k != b_k:
        raise ValueError(
            f"K is {k} in a {tuple(a.data.shape)} but {b_k} in b {tuple(b.data.shape)}: b must be (N, K), "
            "the transpose of the right-hand side"
        )
    for name, (x, scale_inv, layout), shares in zip("ab", (a, b), pair, strict=True):
        expected = layout.scale_shape(*x.shape)
        if scale_inv.shape != expected or scale_inv.dtype is not layout.scales:
            raise ValueError(
                f"scale_inv of {name} is {scale_inv.dtype} of shape {tuple(scale_inv.shape)}: scales per {shares} of a "
                f"{tuple(x.shape)} operand are {layout.scales} {expected}"
            )
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: it must be ({n},), one for each row of b")
    return pair


def _check_formats(a: Operand, b: Operand) -> None:
    for name, x in (("a", a), ("b", b)):
        if x.data.dtype is not x.layout.format:
            raise _wrong_data(name, x)


def _wrong_data(name: str, x: Operand) -> ValueError:
    data = x.data
    return ValueError(
        f"{name} is {data.dtype} of shape {tuple(data.shape)} and strides {tuple(data.stride())}: an FP8 GEMM takes a "
        f"contiguous (rows, K) matrix of {x.layout.format}, as its layout says; quantise it, or .contiguous()"
    )


def take_apart(a: Operand, b: Operand) -> Flat:
    """Split operands into tensors and granularities. Raises ValueError for unsupported layouts or wrong formats."""
    pair = granularities(a.layout, b.layout)
    _check_formats(a, b)
    return a.data, b.data, a.scale_inv, b.scale_inv, *pair


def put_together(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, a_granularity: str, b_granularity: str
) -> tuple[Operand, Operand]:
    """Rebuild the operands that `take_apart` split."""
    return (
        Operand(a, a_scale_inv, Layout(a.dtype, BLOCKS[a_granularity], torch.float32)),
        Operand(b, b_scale_inv, Layout(b.dtype, BLOCKS[b_granularity], torch.float32)),
    )
