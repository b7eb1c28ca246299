"""The quantisers in Triton: one pass over x casts it, writes both layouts, and finds its amax, counts and column sums.

torch.compile sees four operators, whose CPU implementation is the reference; eager calls go straight to the launchers, for
a custom operator costs the host about 20 us a call. Every result is the reference's, bit for bit, column sums excepted.
"""

import functools
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.quantize import BLOCK, ROW, TENSOR, Backend, Layout, Problem, Quantized, fine_kernels, kernels
from te_bench.kernels.quantize.backends import reference
from te_bench.kernels.quantize.backends.reference import check

HALVES = (torch.bfloat16, torch.float16)


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda" and not triton.knobs.runtime.interpret:
        return "needs an NVIDIA GPU (or TRITON_INTERPRET=1)"
    return architecture.lacks_fp8(p.capability)


def scaled(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    column_sum: Tensor | None = None,
    via: torch.dtype | None = None,
) -> Quantized:
    """fp8(x * scale) of x (M, N) with a given () float32 scale, and x's amax and counts; see Backend. ValueError: check."""
    check(x, dtype, rowwise, columnwise, scale=scale, amax=amax, counts=counts, column_sum=column_sum, via=via)
    _check_float(x)
    if torch.compiler.is_compiling():
        made = _scaled_op(x.detach(), scale, dtype, rowwise, columnwise, amax, counts, column_sum, via)
    elif columnwise and x.shape[0] % 2:
        cast = functools.partial(scaled, scale=scale, dtype=dtype, amax=amax, via=via)
        return _one_way_at_a_time(cast, x, rowwise, counts, column_sum, via)
    elif x.numel():
        made = kernels.per_tensor(_aligned(x), scale, dtype, rowwise, columnwise, False, amax, counts, column_sum, via)
    else:
        return reference.scaled(x, scale, dtype, rowwise=rowwise, columnwise=columnwise)
    data, data_t, scale_inv = made
    return wrap(rowwise, columnwise, data, data_t, scale_inv, scale_inv, layout=Layout(dtype, TENSOR, torch.float32))


def scaled_pair(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    w_amax: Tensor | None,
    dtype: torch.dtype,
    columnwise: bool,
    w_columnwise: bool,
) -> tuple[Quantized, Quantized] | None:
    """`scaled` of x (M, K) and of w (N, K), rowwise always, in one launch.

    None where it takes two, which also say what is wrong: other dtypes (see `miscompiled`) and shapes, empty matrices, and
    odd heights of what is asked for transposed.
    """
    if not (x.dtype in HALVES and w.dtype in HALVES) or torch.compiler.is_compiling():
        return None
    if w.dim() != 2 or w.shape[1] != x.shape[1] or not (x.numel() and w.numel()):
        return None
    if (columnwise and x.shape[0] % 2) or (w_columnwise and w.shape[0] % 2):
        return None
    return kernels.pair(x, scale, amax, w, w_scale, w_amax, dtype, columnwise, w_columnwise)


def tensor(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool = False,
    counts: Tensor | None = None,
    column_sum: Tensor | None = None,
) -> Quantized:
    """fp8(x * scale) of x (M, N) with one scale, from its own amax; see Backend. ValueError: check."""
    check(x, dtype, rowwise, columnwise, counts=counts, column_sum=column_sum)
    _check_float(x)
    if torch.compiler.is_compiling():
        made = _tensor_op(x.detach(), dtype, rowwise, columnwise, power_of_two, counts, column_sum)
    elif columnwise and x.shape[0] % 2:
        cast = functools.partial(tensor, dtype=dtype, power_of_two=power_of_two)
        return _one_way_at_a_time(cast, x, rowwise, counts, column_sum)
    elif x.numel():
        made = kernels.per_tensor(_aligned(x), None, dtype, rowwise, columnwise, power_of_two, None, counts, column_sum)
    else:
        return reference.tensor(x, dtype, rowwise=rowwise, columnwise=columnwise)
    data, data_t, scale_inv = made
    return wrap(rowwise, columnwise, data, data_t, scale_inv, scale_inv, layout=Layout(dtype, TENSOR, torch.float32))


def row(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool = False,
    counts: Tensor | None = None,
) -> Quantized:
    """fp8(x * scale) of x (M, N) with one scale for each row of data and each row of data_t; see Backend.

    Raises ValueError: check.
    """
    check(x, dtype, rowwise, columnwise, counts=counts)
    _check_float(x)
    if torch.compiler.is_compiling():
        made = _row_op(x.detach(), dtype, rowwise, columnwise, power_of_two, counts)
    elif columnwise and x.shape[0] % 2:
        cast = functools.partial(row, dtype=dtype, power_of_two=power_of_two)
        return _one_way_at_a_time(cast, x, rowwise, counts, None)
    elif x.numel():
        made = fine_kernels.per_row(_aligned(x), dtype, rowwise, columnwise, power_of_two, counts)
    else:
        return reference.row(x, dtype, rowwise=rowwise, columnwise=columnwise)
    return wrap(rowwise, columnwise, *made, layout=Layout(dtype, ROW, torch.float32))


def block(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rows: int,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool = True,
    counts: Tensor | None = None,
) -> Quantized:
    """fp8(x * scale) of x (M, N) with one scale for each rows x 128 block of either layout, rows 1 or 128; see Backend.

    Blocks at the edges are smaller. Raises ValueError for other rows, and: check.
    """
    check(x, dtype, rowwise, columnwise, rows=rows, counts=counts)
    _check_float(x)
    if torch.compiler.is_compiling():
        made = _block_op(x.detach(), dtype, rows, rowwise, columnwise, power_of_two, counts)
    elif columnwise and x.shape[0] % 2:
        cast = functools.partial(block, dtype=dtype, rows=rows, power_of_two=power_of_two)
        return _one_way_at_a_time(cast, x, rowwise, counts, None)
    elif x.numel():
        made = fine_kernels.per_block(_aligned(x), dtype, rows, rowwise, columnwise, power_of_two, counts)
    else:
        return reference.block(x, dtype, rows=rows, rowwise=rowwise, columnwise=columnwise)
    return wrap(rowwise, columnwise, *made, layout=Layout(dtype, (rows, BLOCK), torch.float32))


def miscompiled(x: Tensor) -> bool:
    """Whether a kernel that casts a tile of x and transposes it whole goes wrong: Triton 3.6 exchanges float32's finished
    FP8 bytes between threads and gets garbage (H200, 2026-11-21). Half precision is exchanged before the cast, and right;
    so are the 16 bits of two bytes, as which these quantisers exchange them.
    """
    return x.dtype is torch.float32


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy where it would be read and written by other threads: see `miscompiled`."""
    return x.contiguous() if miscompiled(x) else x


def _one_way_at_a_time(
    cast: Callable[..., Quantized],
    x: Tensor,
    rowwise: bool,
    counts: Tensor | None,
    column_sum: Tensor | None,
    via: torch.dtype | None = None,
) -> Quantized:
    """data_t, whose bytes no kernel writes by twos where M is odd, from a transposed copy, and data as ever."""
    more = {} if column_sum is None else {"column_sum": column_sum}
    data = scale_inv = None
    if rowwise:
        data, scale_inv, *_ = cast(x.contiguous(), rowwise=True, columnwise=False, counts=counts, **more)
    back = cast(x.t().contiguous(), rowwise=True, columnwise=False, counts=None if rowwise else counts)
    if column_sum is not None and not rowwise:
        column_sum += (x if via is None else x.to(via)).sum(0, dtype=torch.float32)
    return Quantized(data, scale_inv, back.data, back.scale_inv, back.layout)


def _check_float(x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x of {x.dtype}: float32, bfloat16 or float16; the reference backend takes any float")


def wrap(
    rowwise: bool,
    columnwise: bool,
    data: Tensor | None,
    data_t: Tensor | None,
    scale_inv: Tensor | None,
    scale_inv_t: Tensor | None,
    *,
    layout: Layout,
) -> Quantized:
    """Quantized with None for a layout that was not asked for, for which an operator returns an empty tensor."""
    return Quantized(
        data if rowwise else None,
        scale_inv if rowwise else None,
        data_t if columnwise else None,
        scale_inv_t if columnwise else None,
        layout,
    )


@torch.library.custom_op("te_bench::quantize_scaled", mutates_args=("amax", "counts", "column_sum"))
def _scaled_op(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
    column_sum: Tensor | None,
    via: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    implementation = scaled if x.is_cuda else reference.scaled
    return _per_tensor(
        implementation(
            x,
            scale,
            dtype,
            rowwise=rowwise,
            columnwise=columnwise,
            amax=amax,
            counts=counts,
            column_sum=column_sum,
            via=via,
        ),
        x,
    )


@_scaled_op.register_fake
def _(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
    column_sum: Tensor | None,
    via: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_pair(x, dtype, rowwise, columnwise), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("te_bench::quantize_tensor", mutates_args=("counts", "column_sum"))
def _tensor_op(
    x: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    counts: Tensor | None,
    column_sum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    implementation = tensor if x.is_cuda else reference.tensor
    return _per_tensor(
        implementation(
            x,
            dtype,
            rowwise=rowwise,
            columnwise=columnwise,
            power_of_two=power_of_two,
            counts=counts,
            column_sum=column_sum,
        ),
        x,
    )


@_tensor_op.register_fake
def _(
    x: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    counts: Tensor | None,
    column_sum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_pair(x, dtype, rowwise, columnwise), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("te_bench::quantize_row", mutates_args=("counts",))
def _row_op(
    x: Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool, power_of_two: bool, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    implementation = row if x.is_cuda else reference.row
    return _all(
        implementation(x, dtype, rowwise=rowwise, columnwise=columnwise, power_of_two=power_of_two, counts=counts),
        x,
    )


@_row_op.register_fake
def _(
    x: Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool, power_of_two: bool, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, n = x.shape
    return (
        *_fake_pair(x, dtype, rowwise, columnwise),
        x.new_empty(m if rowwise else 0, dtype=torch.float32),
        x.new_empty(n if columnwise else 0, dtype=torch.float32),
    )


@torch.library.custom_op("te_bench::quantize_block", mutates_args=("counts",))
def _block_op(
    x: Tensor,
    dtype: torch.dtype,
    rows: int,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    implementation = block if x.is_cuda else reference.block
    return _all(
        implementation(
            x,
            dtype,
            rows=rows,
            rowwise=rowwise,
            columnwise=columnwise,
            power_of_two=power_of_two,
            counts=counts,
        ),
        x,
    )


@_block_op.register_fake
def _(
    x: Tensor,
    dtype: torch.dtype,
    rows: int,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, n = x.shape
    down, across = (m + BLOCK - 1) // BLOCK, (n + BLOCK - 1) // BLOCK
    return (
        *_fake_pair(x, dtype, rowwise, columnwise),
        x.new_empty((m if rows == 1 else down, across) if rowwise else (0,), dtype=torch.float32),
        x.new_empty((n if rows == 1 else across, down) if columnwise else (0,), dtype=torch.float32),
    )


def _fake_pair(x: Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> tuple[Tensor, Tensor]:
    m, n = x.shape
    return x.new_empty((m, n) if rowwise else (0,), dtype=dtype), x.new_empty(
        (n, m) if columnwise else (0,), dtype=dtype
    )


def _per_tensor(q: Quantized, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    data, data_t, scale_inv, scale_inv_t = _all(q, x)
    return data, data_t, scale_inv if q.scale_inv is not None else scale_inv_t


def _all(q: Quantized, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """data, data_t, scale_inv, scale_inv_t, what is absent as an empty tensor: an operator can't return None."""
    there = q.data if q.data is not None else q.data_t
    nothing, no_scale = x.new_empty(0, dtype=there.dtype), x.new_empty(0, dtype=torch.float32)
    return (
        nothing if q.data is None else q.data,
        nothing if q.data_t is None else q.data_t,
        no_scale if q.scale_inv is None else q.scale_inv.contiguous(),  # as its fake implementation says
        no_scale if q.scale_inv_t is None else q.scale_inv_t.contiguous(),
    )


BACKEND = Backend(scaled=scaled, tensor=tensor, row=row, block=block, unsupported=unsupported)
