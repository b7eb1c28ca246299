# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""An activation's gradient, and the activation again, both in FP8, in one pass over what they are made of.

The weight's gradient reads act(h) transposed, which only h decides: cast a second time where h is read anyway it costs the
bytes that the forward pass then need not write, and 4 C bytes a token are not kept from the one to the other.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.activation import KINDS, Backend, width
from te_bench.kernels.activation.kernels import QUANTIZED, UNALIGNED, _constants, _store_pairs, _value_and_slope
from te_bench.kernels.launch import launch, rows_contiguous, traits
from te_bench.kernels.quantize import TENSOR, Layout, Quantized
from te_bench.kernels.quantize.backends import reference
from te_bench.kernels.quantize.backends import triton as quantizer
from te_bench.kernels.quantize.kernels import add_sums, float32, load_pairs, store_pairs
from te_bench.kernels.tile import FP8, empty_pair, read_amax, rounded_by_twos


@triton.jit
def _value_and_gradient(dy, x, F: tl.constexpr, DTYPE: tl.constexpr):
    """f(x) and dy * f'(x), in half precision."""
    value, slope = _value_and_slope(x.to(tl.float32), F)
    return rounded_by_twos(value, DTYPE), rounded_by_twos(dy.to(tl.float32) * slope, DTYPE)


@triton.jit(do_not_specialize_on_alignment=[*UNALIGNED, "value_scale"])
def _recomputing_cast_kernel(
    dy, x, scale, data, data_t, scale_inv, amax, counts, sums, value_scale, value_t, dy_stride, stride, M, WIDTH,
    F: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr, VALUE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """_backward_cast_kernel of a kind without a gate; the FP8 of f(x) goes into value_t (WIDTH, M)."""
    index = tl.program_id(0)
    factor, by = tl.load(scale), tl.load(value_scale)
    before = 0
    if amax is not None:
        before = read_amax(amax)
    a, b, rows, cols = load_pairs(x, index, stride, M, WIDTH, ROWS, COLUMNS, VECTOR)
    a_dy, b_dy, _, _ = load_pairs(dy, index, dy_stride, M, WIDTH, ROWS, COLUMNS, VECTOR)
    if index == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
    if sums is not None:
        sums += (index // tl.cdiv(WIDTH, COLUMNS)).to(tl.int64) * WIDTH
    a_value, a_dx = _value_and_gradient(a_dy, a, F, DTYPE)
    b_value, b_dx = _value_and_gradient(b_dy, b, F, DTYPE)
    store_pairs(a_value, b_value, by, None, value_t, index, rows, cols, WIDTH, M, WIDTH, VALUE, ROWS, COLUMNS, POLICY)
    _store_pairs(
        a_dx, b_dx, factor, data, data_t, sums, amax, before, counts, index, rows, cols, WIDTH, M, WIDTH,
        TARGET, ROWS, COLUMNS, POLICY,
    )  # fmt: skip


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

    dy, x (M, F), kind without a gate -> Quantized (M, F), (F, M). Raises ValueError as backward_quantized, and for a gate.
    """
    width(x, kind, dy)
    if KINDS[kind][1]:
        raise ValueError(f"kind {kind}: its gate's gradient needs both halves; take backward_quantized")
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
    m, n = x.shape
    data, data_t = empty_pair(m, n, x, dtype, rowwise=True, columnwise=True)
    value_t = x.new_empty(n, m, dtype=value_dtype)
    scale_inv = float32(x)
    bands = max(1, -(-m // QUANTIZED["ROWS"]))
    sums = None if column_sum is None else float32(x, bands, n)
    dy_stride, stride = dy.stride(0), x.stride(0)
    key = (
        *traits(dy, x, scale, amax, counts, value_scale),
        *(dy_stride, stride, m, n, kind, dtype, value_dtype, column_sum is None),
    )
    args = (
        *(dy, x, scale, data, data_t, scale_inv, amax, counts, sums, value_scale, value_t),
        *(dy_stride, stride, m, n),
    )
    constants = {**_constants(kind, x), "TARGET": FP8[dtype], "VALUE": FP8[value_dtype], **QUANTIZED}
    launch(_recomputing_cast_kernel, bands * -(-n // QUANTIZED["COLUMNS"]), key, x.get_device(), args, constants)
    if column_sum is not None and sums is not None:
        add_sums(sums, column_sum)
    return Quantized(data, scale_inv, data_t, scale_inv, Layout(dtype, TENSOR, torch.float32)), value_t
