# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""GEMMs of `quantize.block_formats`' operands: by `block_scaled` where a GPU has it, else in half precision.

Every product is exact in float32 by both, so that they differ in the order of float32 sums alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.gemm import block_scaled
from te_bench.kernels.gemm.block_scaled import alpha_of
from te_bench.kernels.launch import launch, traits
from te_bench.kernels.operators import define
from te_bench.kernels.quantize import Operand
from te_bench.kernels.quantize.block_formats import MXFP8_LAYOUT, NVFP4_LAYOUT, alpha
from te_bench.kernels.tile import FLOATS, rounded

ELEMENTS = 2048  # per program that finishes a product


def forward(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    a_dtype: torch.dtype = torch.float8_e4m3fn,
    emulate: bool = False,
) -> Tensor:
    """Compute D = alpha (a.data @ b.data.T) + bias, float32 until rounded; a (M, K), b (N, K) bf16 -> (M, N) out_dtype.

    alpha is 1 for MXFP8, `quantize.block_formats.alpha` of both scale_inv for NVFP4. a_dtype: the FP8 format of MXFP8's
    a; b's is E4M3. emulate: in half precision on any device. Raises ValueError for other or mixed layouts, and for a K or
    a bias that does not fit.
    """
    if a.layout != b.layout or a.layout not in (MXFP8_LAYOUT, NVFP4_LAYOUT):
        raise ValueError(f"{a.layout} by {b.layout}: both must be MXFP8's or both NVFP4's, of quantize.block_formats")
    (_, k), (n, b_k) = a.data.shape, b.data.shape
    if k != b_k:
        raise ValueError(f"K is {k} in a and {b_k} in b {(n, b_k)}: of NVFP4 both must be transformed, or neither")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: it must be ({n},), one for each row of b")
    eager = a.data.is_cuda and not torch.compiler.is_compiling()
    made: Tensor = (_multiply if eager else _operator)(
        a.data, b.data, a.scale_inv, b.scale_inv, out_dtype, bias, a_dtype, emulate
    )  # fmt: skip
    return made


def _multiply(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor | None,
    b_scale_inv: Tensor | None,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    a_dtype: torch.dtype,
    emulate: bool,
) -> Tensor:
    if not emulate and block_scaled.supported(a.device) and a.numel() and b.numel():
        return block_scaled.multiply(a, b, a_scale_inv, b_scale_inv, out_dtype, bias, a_dtype)
    with torch.autocast(a.device.type, enabled=False):
        if not a.is_cuda:  # a CPU rounds bf16 products on the way
            return _finished(a.float() @ b.float().t(), a_scale_inv, b_scale_inv, out_dtype, bias)
        if a_scale_inv is None and out_dtype is torch.bfloat16:
            return F.linear(a, b, None if bias is None else bias.to(out_dtype))
        out = torch.mm(a, b.t(), out_dtype=torch.float32)
        if not out.numel() or (a_scale_inv is None and bias is None and out_dtype is torch.float32):
            return out.to(out_dtype)
        return finish(out, a_scale_inv, b_scale_inv, out_dtype, bias)


def _finished(
    out: Tensor, a_scale_inv: Tensor | None, b_scale_inv: Tensor | None, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """Return alpha out + bias, rounded once; out is float32 and may be overwritten."""
    if a_scale_inv is not None and b_scale_inv is not None:
        out *= alpha(a_scale_inv, b_scale_inv)
    return (out if bias is None else out + bias.float()).to(out_dtype)


def finish(
    out: Tensor, a_scale_inv: Tensor | None, b_scale_inv: Tensor | None, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """`_finished` in one pass of a Triton kernel; out (M, N) is contiguous and not empty."""
    made, bias = out.new_empty(out.shape, dtype=out_dtype), None if bias is None else bias.contiguous()
    args = (out, a_scale_inv, b_scale_inv, bias, made, out.numel(), out.shape[1])
    key = (*traits(out, bias), out.shape[0], out.shape[1], a_scale_inv is None, out_dtype)
    constants = {"ELEMENTS": ELEMENTS, "DTYPE": FLOATS[out_dtype], "num_warps": 8, "enable_fp_fusion": False}
    launch(block_formats_finish_kernel, -(-out.numel() // ELEMENTS), key, out.get_device(), args, constants)
    return made


@triton.jit(do_not_specialize_on_alignment=["a_scale_inv", "b_scale_inv"])
def block_formats_finish_kernel(
    out, a_scale_inv, b_scale_inv, bias, made, size, N, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr
):
    """Write alpha out + bias to made, with alpha of block_formats.alpha."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    y = tl.load(out + at, mask=at < size)
    if a_scale_inv is not None:
        y *= alpha_of(a_scale_inv, b_scale_inv)
    if bias is not None:
        y += tl.load(bias + at % N, mask=at < size).to(tl.float32)
    tl.store(made + at, rounded(y, DTYPE), mask=at < size)


def _fake(a: Tensor, b: Tensor, _a: Any, _b: Any, out_dtype: torch.dtype, *_: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


_operator = define("block_formats_product", _multiply, _fake)
