"""Fused activations in Triton: plain, and with the FP8 cast into both layouts, amax and the bias gradient in one pass.

torch.compile sees four operators, whose CPU implementation is the reference; eager calls go straight to the launchers,
for a custom operator costs the host about 20 us a call.
"""

import functools

import torch
import triton
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.activation import Backend, Problem, kernels, width
from te_bench.kernels.activation.backends import reference
from te_bench.kernels.quantize import TENSOR, Layout, Quantized, check_layouts
from te_bench.kernels.quantize.backends import triton as quantizer


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda" and not triton.knobs.runtime.interpret:
        return "needs an NVIDIA GPU (or TRITON_INTERPRET=1)"
    return architecture.lacks_fp8(p.capability) if p.quantized else None


def forward(x: Tensor, kind: str) -> Tensor:
    """y = f(x), or f(x[:, :F]) * x[:, F:] of a gated kind; x (M, F) or (M, 2F) -> (M, F) in x's dtype.

    Raises ValueError for an unknown kind and for an odd width of a gated one.
    """
    width(x, kind)
    return _forward_op(x, kind) if torch.compiler.is_compiling() else kernels.forward(x, kind)


def forward_quantized(
    x: Tensor,
    kind: str,
    *,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> Quantized:
    """fp8(y * scale) in the layouts asked for, with y of `forward` rounded to x's dtype beforehand.

    amax, () float32, becomes max(amax, max |y|) and counts, (3,) int64, is added to. Raises ValueError as `forward`.
    """
    width(x, kind)
    check_layouts(rowwise, columnwise)
    if _in_two_steps(x, columnwise):
        y = forward(x, kind)
        return quantizer.scaled(y, scale, dtype, rowwise=rowwise, columnwise=columnwise, amax=amax, counts=counts)
    run = _forward_quantized_op if torch.compiler.is_compiling() else kernels.forward_quantized
    return _quantized(run(x, kind, scale, dtype, rowwise, columnwise, amax, counts), dtype, rowwise, columnwise)


def backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """dx = dy * f'(x), of a gated kind [dy * x[:, F:] * f'(x[:, :F]), dy * f(x[:, :F])]; -> x's shape and dtype."""
    width(x, kind, dy)
    return _backward_op(dy, x, kind) if torch.compiler.is_compiling() else kernels.backward(dy, x, kind)


def backward_quantized(
    dy: Tensor,
    x: Tensor,
    kind: str,
    *,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    column_sum: Tensor | None = None,
) -> Quantized:
    """fp8(dx * scale) in the layouts asked for, dx of `backward` rounded to x's dtype; column_sum += sum_M(dx).

    column_sum is float32 of x's width; amax and counts as in `forward_quantized`. Raises ValueError as `backward`.
    """
    width(x, kind, dy)
    check_layouts(rowwise, columnwise)
    if _in_two_steps(x, columnwise):
        cast = functools.partial(quantizer.scaled, amax=amax, counts=counts, column_sum=column_sum)
        return cast(backward(dy, x, kind), scale, dtype, rowwise=rowwise, columnwise=columnwise)
    run = _backward_quantized_op if torch.compiler.is_compiling() else kernels.backward_quantized
    return _quantized(
        run(dy, x, kind, scale, dtype, rowwise, columnwise, amax, counts, column_sum), dtype, rowwise, columnwise
    )


def _in_two_steps(x: Tensor, columnwise: bool) -> bool:
    """Where the kernels, which go by pairs of rows of half precision, do not reach: float32, and odd heights transposed."""
    return x.dtype is torch.float32 or (columnwise and x.shape[0] % 2 == 1)


def _quantized(
    parts: tuple[Tensor | None, Tensor | None, Tensor], dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> Quantized:
    return quantizer.wrap(rowwise, columnwise, *parts, parts[2], layout=Layout(dtype, TENSOR, torch.float32))


@torch.library.custom_op("te_bench::activation_forward", mutates_args=())
def _forward_op(x: Tensor, kind: str) -> Tensor:
    return kernels.forward(x, kind) if x.is_cuda else reference.forward(x, kind)


@_forward_op.register_fake
def _(x: Tensor, kind: str) -> Tensor:
    return x.new_empty((x.shape[0], width(x, kind)))


@torch.library.custom_op("te_bench::activation_forward_quantized", mutates_args=("amax", "counts"))
def _forward_quantized_op(
    x: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda:
        data, data_t, scale_inv = kernels.forward_quantized(x, kind, scale, dtype, rowwise, columnwise, amax, counts)
    else:
        data, _, data_t, *_ = reference.forward_quantized(
            x, kind, scale=scale, dtype=dtype, rowwise=rowwise, columnwise=columnwise, amax=amax, counts=counts
        )
        scale_inv = scale.reciprocal()
    return _or_empty(data, x, dtype), _or_empty(data_t, x, dtype), scale_inv


@_forward_quantized_op.register_fake
def _(
    x: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_pair(x, x.shape[0], width(x, kind), dtype, rowwise, columnwise)


@torch.library.custom_op("te_bench::activation_backward", mutates_args=())
def _backward_op(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    return kernels.backward(dy, x, kind) if x.is_cuda else reference.backward(dy, x, kind)


@_backward_op.register_fake
def _(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("te_bench::activation_backward_quantized", mutates_args=("amax", "counts", "column_sum"))
def _backward_quantized_op(
    dy: Tensor,
    x: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
    column_sum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda:
        data, data_t, scale_inv = kernels.backward_quantized(
            dy, x, kind, scale, dtype, rowwise, columnwise, amax, counts, column_sum
        )
    else:
        data, _, data_t, *_ = reference.backward_quantized(
            dy,
            x,
            kind,
            scale=scale,
            dtype=dtype,
            rowwise=rowwise,
            columnwise=columnwise,
            amax=amax,
            counts=counts,
            column_sum=column_sum,
        )
        scale_inv = scale.reciprocal()
    return _or_empty(data, x, dtype), _or_empty(data_t, x, dtype), scale_inv


@_backward_quantized_op.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
    column_sum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_pair(x, x.shape[0], x.shape[1], dtype, rowwise, columnwise)


def _or_empty(tensor: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor, or an empty one: an operator can't return None."""
    return x.new_empty(0, dtype=dtype) if tensor is None else tensor


def _fake_pair(
    x: Tensor, m: int, n: int, dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    data = x.new_empty((m, n) if rowwise else (0,), dtype=dtype)
    data_t = x.new_empty((n, m) if columnwise else (0,), dtype=dtype)
    return data, data_t, x.new_empty((), dtype=torch.float32)


BACKEND = Backend(
    forward=forward,
    forward_quantized=forward_quantized,
    backward=backward,
    backward_quantized=backward_quantized,
    unsupported=unsupported,
)
