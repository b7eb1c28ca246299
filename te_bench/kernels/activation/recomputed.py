# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""An activation's gradient, and the activation again, in one pass over what they are made of; in FP8 or in x's dtype.

The weight's gradient reads act(h) transposed, which only h decides: cast a second time where h is read anyway it costs the
bytes that the forward pass then need not write, and F bytes a token are not kept from the one to the other. In half
precision that is 2 F, and they are written twice.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.activation import Backend, width
from te_bench.kernels.activation.kernels import (
    GATED_BACKWARD,
    QUANTIZED,
    UNALIGNED,
    _constants,
    _value_and_slope,
    backward,
    store_gradients,
)
from te_bench.kernels.launch import launch, rows_contiguous, traits
from te_bench.kernels.quantize import TENSOR, Layout, Quantized
from te_bench.kernels.quantize.backends import reference
from te_bench.kernels.quantize.backends import triton as quantizer
from te_bench.kernels.quantize.kernels import add_sums, float32, load_pairs, store_pairs
from te_bench.kernels.tile import FP8, empty_pair, read_amax, rounded_by_twos


@triton.jit
def _value_and_gradients(dy, x, gate, F: tl.constexpr, DTYPE: tl.constexpr):
    """f(x), times gate unless that is None, and what _gradients makes, in half precision."""
    value, slope = _value_and_slope(x.to(tl.float32), F)
    if gate is None:
        made, first = rounded_by_twos(value, DTYPE), rounded_by_twos(dy.to(tl.float32) * slope, DTYPE)
        return made, first, first
    else:
        by, d = gate.to(tl.float32), dy.to(tl.float32)
        first, second = rounded_by_twos(d * (slope * by), DTYPE), rounded_by_twos(d * value, DTYPE)
        return rounded_by_twos(value * by, DTYPE), first, second


@triton.jit(do_not_specialize_on_alignment=[*UNALIGNED, "value_scale"])
def _recomputing_cast_kernel(
    dy, x, scale, data, data_t, scale_inv, amax, counts, sums, value_scale, value_t, dy_stride, stride, M, WIDTH,
    F: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr, VALUE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """_backward_cast_kernel; the FP8 of what dy is the gradient of goes into value_t (WIDTH, M)."""
    index = tl.program_id(0)
    factor, by = tl.load(scale), tl.load(value_scale)
    before = 0
    if amax is not None:
        before = read_amax(amax)
    a, b, rows, cols = load_pairs(x, index, stride, M, WIDTH, ROWS, COLUMNS, VECTOR)
    a_dy, b_dy, _, _ = load_pairs(dy, index, dy_stride, M, WIDTH, ROWS, COLUMNS, VECTOR)
    a_gate, b_gate = None, None
    if GATED:
        a_gate, b_gate, _, _ = load_pairs(x + WIDTH, index, stride, M, WIDTH, ROWS, COLUMNS, VECTOR)
    if index == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
    N = WIDTH * 2 if GATED else WIDTH
    if sums is not None:
        sums += (index // tl.cdiv(WIDTH, COLUMNS)).to(tl.int64) * N
    a_value, a_dx, a_dgate = _value_and_gradients(a_dy, a, a_gate, F, DTYPE)
    b_value, b_dx, b_dgate = _value_and_gradients(b_dy, b, b_gate, F, DTYPE)
    store_pairs(a_value, b_value, by, None, value_t, index, rows, cols, WIDTH, M, WIDTH, VALUE, ROWS, COLUMNS, POLICY)
    store_gradients(
        a_dx, b_dx, a_dgate, b_dgate, factor, data, data_t, sums, amax, before, counts, index, rows, cols, M, WIDTH,
        GATED, TARGET, ROWS, COLUMNS, POLICY,
    )  # fmt: skip


def gradient_and_value(kernels: Backend, dy: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """backward and forward of `kernels`, bit for bit; raises ValueError as they do."""
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
    """backward_quantized of `kernels` in both layouts, and data_t of its forward_quantized by value_scale, bit for bit.

    dy (M, F), x (M, F), of a gated kind (M, 2F) -> Quantized of x's shape, (F, M). Raises ValueError as backward_quantized.
    """
    width(x, kind, dy)
    looks: dict[str, Any] = {"amax": amax, "counts": counts, "column_sum": column_sum}
    if x.is_cuda and x.dtype is not torch.float32 and x.shape[0] % 2 == 0 and not torch.compiler.is_compiling():
        return kernel(dy, x, kind, scale, dtype, value_scale, value_dtype, **looks)
    packed: Quantized = kernels.backward_quantized(
        dy, x, kind, scale=scale, dtype=dtype, rowwise=True, columnwise=True, **looks
    )
    again = quantizer.scaled if x.is_cuda else reference.scaled
    value: Any = again(kernels.forward(x, kind), value_scale, value_dtype, rowwise=False, columnwise=True)
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
    """The same by one kernel: x of half precision, M even."""
    dy, x = rows_contiguous(dy), rows_contiguous(x)
    (m, n), f = x.shape, dy.shape[1]
    data, data_t = empty_pair(m, n, x, dtype, rowwise=True, columnwise=True)
    value_t = x.new_empty(f, m, dtype=value_dtype)
    scale_inv = float32(x)
    tile = GATED_BACKWARD if n > f else QUANTIZED
    bands = max(1, -(-m // tile["ROWS"]))
    sums = None if column_sum is None else float32(x, bands, n)
    dy_stride, stride = dy.stride(0), x.stride(0)
    key = (
        *traits(dy, x, scale, amax, counts, value_scale),
        *(dy_stride, stride, m, f, kind, dtype, value_dtype, column_sum is None),
    )
    args = (
        *(dy, x, scale, data, data_t, scale_inv, amax, counts, sums, value_scale, value_t),
        *(dy_stride, stride, m, f),
    )
    constants = {**_constants(kind, x), "TARGET": FP8[dtype], "VALUE": FP8[value_dtype], **tile}
    launch(_recomputing_cast_kernel, bands * -(-f // tile["COLUMNS"]), key, x.get_device(), args, constants)
    if column_sum is not None and sums is not None:
        add_sums(sums, column_sum)
    return Quantized(data, scale_inv, data_t, scale_inv, Layout(dtype, TENSOR, torch.float32)), value_t
