"""Compute an activation's gradient and the activation again in one pass over its input, in FP8 or in x's dtype.

wgrad reads act(h) transposed, which depends on h only. Casting it again while h is read for the gradient costs the
bytes that the forward pass then need not write, and F bytes a token need not be saved in between. In half precision
that is 2 F bytes, written in both passes.
"""

from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.activation import Backend, width
from te_bench.kernels.activation.kernels import backward, backward_quantized
from te_bench.kernels.quantize import Quantized
from te_bench.kernels.quantize.backends import reference
from te_bench.kernels.quantize.backends import triton as quantizer


def gradient_and_value(kernels: Backend, dy: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return (backward, forward) of `kernels`, bit for bit; raises ValueError as they do."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return kernels.backward(dy, x, kind), kernels.forward(x, kind)
    y = x.new_empty(x.shape[0], width(x, kind, dy))
    return backward(dy, x, kind, y), y


def recomputed(
    kernels: Backend,
    dy: Tensor,
    x: Tensor,
    kind: str,
    *,
    scale: Tensor,
    dtype: torch.dtype,
    value_scale: Tensor,
    value_dtype: torch.dtype,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    column_sum: Tensor | None = None,
) -> tuple[Quantized, Tensor]:
    """Return backward_quantized of `kernels` in both layouts, and forward_quantized's data_t by value_scale, bitwise.

    dy (M, F), x (M, F), or (M, 2F) gated -> Quantized of x's shape, (F, M). Raises ValueError as backward_quantized.
    """
    width(x, kind, dy)
    looks: dict[str, Any] = {"amax": amax, "counts": counts, "column_sum": column_sum}
    if x.is_cuda and x.dtype is not torch.float32 and x.shape[0] % 2 == 0 and not torch.compiler.is_compiling():
        return kernel(dy, x, kind, scale, dtype, value_scale, value_dtype, **looks)
    packed: Quantized = kernels.backward_quantized(
        dy, x, kind, scale=scale, dtype=dtype, rowwise=True, columnwise=True, **looks
    )
    again = quantizer.quantize if x.is_cuda else reference.quantize
    value = again(kernels.forward(x, kind), value_dtype, scale=value_scale, rowwise=False, columnwise=True)
    return packed, value.data_t


def kernel(
    dy: Tensor,
    x: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    value_scale: Tensor,
    value_dtype: torch.dtype,
    *,
    amax: Tensor | None,
    counts: Tensor | None,
    column_sum: Tensor | None,
) -> tuple[Quantized, Tensor]:
    """`recomputed` by one kernel; x in half precision, M even."""
    value_t = x.new_empty(dy.shape[1], x.shape[0], dtype=value_dtype)
    looks = amax, counts, column_sum, value_scale, value_t
    data, data_t, scale_inv = backward_quantized(dy, x, kind, scale, dtype, True, True, *looks)
    return reference.one_scale(dtype, True, True, data, data_t, scale_inv), value_t
