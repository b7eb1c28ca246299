"""FP8 GEMM by exact emulation: dequantise to float32 (every FP8 product is exact there) and multiply. Runs anywhere.

It is one operator, te_bench::reference_gemm: a profiler sees each product, compiled or not, but not its parts.
"""

import torch
from torch import Tensor

from te_bench.kernels.autograd import cast
from te_bench.kernels.gemm import Backend, Problem
from te_bench.kernels.gemm.operands import check, refusal
from te_bench.kernels.gemm.operators import as_operator
from te_bench.kernels.quantize import BLOCK, SQUARE, Operand
from te_bench.kernels.quantize.backends.reference import dequantize, widened


def unsupported(p: Problem) -> str | None:
    return refusal(p.a, p.b)


def _multiply(
    a: Operand, b: Operand, *, out_dtype: torch.dtype, fast_accum: bool = False, bias: Tensor | None = None
) -> Tensor:
    """Compute D = dequantise(a) @ dequantise(b).T + bias, rounded once from float32; a (M, K), b (N, K) -> (M, N).

    Block scales multiply the float32 sum over their 128 of K. fast_accum changes nothing: sums are float32. Raises
    ValueError for operands that cannot be multiplied.
    """
    kind, _ = check(a, b, bias)
    with torch.autocast(a.data.device.type, enabled=False):
        # FP8 is exact in TF32 and bfloat16, so torch.set_float32_matmul_precision does not matter here.
        if kind == "tensor":
            out = (widened(a.data) @ widened(b.data).t()).mul_(a.scale_inv * b.scale_inv)
        elif kind == "row":
            out = (widened(a.data) @ widened(b.data).t()).mul_(a.scale_inv[:, None]).mul_(b.scale_inv)
        else:
            out = _blocks(widened(a.data), widened(b.data), _of_each_row(a), _of_each_row(b))
        return (out if bias is None else out + bias.float()).to(out_dtype)


forward = as_operator("reference_gemm", _multiply)


def dequantized(a: Operand, b: Operand, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Compute D = dequantise(a) @ dequantise(b).T + bias in float32, for any layouts; (M, K), (N, K) -> (M, N)."""
    with torch.autocast(a.data.device.type, enabled=False):
        out = dequantize(a) @ dequantize(b).t()
        return cast(out if bias is None else out + bias.float(), out_dtype)


def _blocks(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor) -> Tensor:
    """Sum (a_block @ b_block.T) * scales over the blocks of K; scales are (rows, blocks) each."""
    out = None
    for i in range(a_scale_inv.shape[1]):
        along = slice(i * BLOCK, (i + 1) * BLOCK)
        product = (a[:, along] @ b[:, along].t()).mul_(a_scale_inv[:, i, None]).mul_(b_scale_inv[:, i])
        out = product if out is None else out.add_(product)
    return a.new_zeros(a.shape[0], b.shape[0]) if out is None else out


def _of_each_row(x: Operand) -> Tensor:
    return x.scale_inv.repeat_interleave(BLOCK, 0)[: x.data.shape[0]] if x.layout.block == SQUARE else x.scale_inv


BACKEND = Backend(forward=forward, unsupported=unsupported)
