"""FP8 GEMM by exact emulation: dequantise to float32 (every FP8 product is exact there) and multiply. Runs anywhere."""

import torch
from torch import Tensor

from te_bench.kernels.gemm import Backend, Problem, granularities
from te_bench.kernels.quantize import BLOCK


def unsupported(p: Problem) -> str | None:
    return None


def forward(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    *,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """D = dequantise(a) @ dequantise(b).T + bias, rounded once from float32; a (M, K), b (N, K) FP8 -> (M, N) out_dtype.

    Block scales multiply the float32 sum over their 128 of K. fast_accum changes nothing: sums are float32 here.
    Raises ValueError for operands that cannot be multiplied.
    """
    kind, _ = granularities(a, b, a_scale_inv, b_scale_inv, bias)
    with torch.autocast(a.device.type, enabled=False):
        # FP8 fits into TF32 and even bfloat16, so that torch.set_float32_matmul_precision does not matter here.
        if kind == "tensor":
            out = (a.float() @ b.float().t()) * (a_scale_inv * b_scale_inv)
        elif kind == "row":
            out = (a.float() @ b.float().t()) * a_scale_inv[:, None] * b_scale_inv
        else:
            out = _blocks(a.float(), b.float(), a_scale_inv, b_scale_inv)
        return (out if bias is None else out + bias.float()).to(out_dtype)


def _blocks(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor) -> Tensor:
    """Sum over the blocks of K of (a_block @ b_block.T) * their scales."""
    out = a.new_zeros(a.shape[0], b.shape[0])
    a_scale_inv, b_scale_inv = _each_row(a_scale_inv, a.shape[0]), _each_row(b_scale_inv, b.shape[0])
    for i in range(a_scale_inv.shape[1]):
        along = slice(i * BLOCK, (i + 1) * BLOCK)
        out += (a[:, along] @ b[:, along].t()) * a_scale_inv[:, i, None] * b_scale_inv[:, i]
    return out


def _each_row(scale_inv: Tensor, rows: int) -> Tensor:
    """(rows, blocks) from scales of 1 x 128 or 128 x 128 blocks."""
    return scale_inv if scale_inv.shape[0] == rows else scale_inv.repeat_interleave(BLOCK, 0)[:rows]


BACKEND = Backend(forward=forward, unsupported=unsupported)
