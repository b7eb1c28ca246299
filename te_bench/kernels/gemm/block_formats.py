"""GEMMs of what `quantize.block_formats` made, by half precision's: every product there is exact in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_bench.kernels.quantize import Operand
from te_bench.kernels.quantize.block_formats import MXFP8_LAYOUT, NVFP4_LAYOUT, alpha


def forward(a: Operand, b: Operand, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """D = alpha (a.data @ b.data.T) + bias, in float32 until rounded; a (M, K), b (N, K) in bf16 -> (M, N) of out_dtype.

    alpha is 1 for MXFP8, `quantize.block_formats.alpha` of both scale_inv for NVFP4. Raises ValueError for other layouts,
    and where a and b are of two.
    """
    if a.layout != b.layout or a.layout not in (MXFP8_LAYOUT, NVFP4_LAYOUT):
        raise ValueError(f"{a.layout} by {b.layout}: both must be MXFP8's or both NVFP4's, of quantize.block_formats")
    if a.data.shape[1] != b.data.shape[1]:
        raise ValueError(
            f"K is {a.data.shape[1]} and {b.data.shape[1]}: of a's and b's transposed layouts both must be transformed, "
            "or neither"
        )
    parts = a.data, b.data, a.scale_inv, b.scale_inv
    if a.data.is_cuda and not torch.compiler.is_compiling():
        return _multiply(*parts, out_dtype, bias)
    return _operator(*parts, out_dtype, bias)


def _multiply(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor | None,
    b_scale_inv: Tensor | None,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        if a.is_cuda and a_scale_inv is None and out_dtype is torch.bfloat16:
            return F.linear(a, b, None if bias is None else bias.to(out_dtype))
        # Of a CPU's products the operands are widened: its sums would else be rounded to bf16 on the way.
        out = torch.mm(a, b.t(), out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().t()
        if a_scale_inv is not None and b_scale_inv is not None:
            out *= alpha(a_scale_inv, b_scale_inv)
        return (out if bias is None else out + bias.float()).to(out_dtype)


@torch.library.custom_op("te_bench::block_formats_product", mutates_args=())
def _operator(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor | None,
    b_scale_inv: Tensor | None,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    return _multiply(a, b, a_scale_inv, b_scale_inv, out_dtype, bias)


@_operator.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor | None,
    b_scale_inv: Tensor | None,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
