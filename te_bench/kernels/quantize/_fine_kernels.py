# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton kernels and launchers of the quantisers with a scale for each row, or for each block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels._epilogue import FP8, empty_pair, magnitude, publish, tally
from te_bench.kernels._launch import launch, rows_contiguous, traits
from te_bench.kernels.quantize import BLOCK
from te_bench.kernels.quantize._kernels import (
    COLUMNS,
    ROWS,
    TILE,
    UNALIGNED,
    WARPS,
    float32,
    load_tile,
    scale_of,
    store,
    store_t,
)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _line_amax_kernel(
    x,
    amaxes,
    stride,
    M,
    N,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """amaxes, zeros before: the largest bits of each of the M rows, then of each of the N columns."""
    v, rows, cols, _ = load_tile(x, tl.program_id(0), stride, M, N, ROWS, COLUMNS)
    bits = magnitude(v.to(tl.float32))
    if ROWWISE:
        tl.atomic_max(amaxes + rows, tl.max(bits, 1), mask=rows < M, sem="relaxed")
    if COLUMNWISE:
        tl.atomic_max(amaxes + M + cols, tl.max(bits, 0), mask=cols < N, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _line_cast_kernel(
    x,
    amaxes,
    data,
    data_t,
    scale_inv,
    scale_inv_t,
    counts,
    stride,
    M,
    N,
    POWER_OF_TWO: tl.constexpr,
    TARGET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile a program, by the amaxes of _line_amax_kernel."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    v, rows, cols, mask = load_tile(x, index, stride, M, N, ROWS, COLUMNS)
    bits = magnitude(v.to(tl.float32))
    if data is not None:
        by_row = scale_of(tl.load(amaxes + rows, mask=rows < M, other=0), TARGET, POWER_OF_TWO)
        if index % tl.cdiv(N, COLUMNS) == 0:
            tl.store(scale_inv + rows, tl.div_rn(1.0, by_row), mask=rows < M)
        store(v, by_row[:, None], data, rows, cols, mask, N, TARGET)
        if counts is not None:
            publish(bits, tally(bits, by_row[:, None], TARGET), None, counts)
    if data_t is not None:
        by_column = scale_of(tl.load(amaxes + M + cols, mask=cols < N, other=0), TARGET, POWER_OF_TWO)
        if index < tl.cdiv(N, COLUMNS):
            tl.store(scale_inv_t + cols, tl.div_rn(1.0, by_column), mask=cols < N)
        store_t(v, by_column[:, None], data_t, rows, cols, mask, M, TARGET)
        if counts is not None and data is None:
            publish(bits, tally(bits, by_column[None, :], TARGET), None, counts)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _block_kernel(
    x,
    data,
    data_t,
    scale_inv,
    scale_inv_t,
    counts,
    stride,
    M,
    N,
    SQUARE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A BLOCK x BLOCK tile a program: SQUARE, one scale; else one for each of its rows, and of its columns in data_t."""
    index = tl.program_id(0)
    across, down = tl.cdiv(N, BLOCK), tl.cdiv(M, BLOCK)
    v, rows, cols, mask = load_tile(x, index, stride, M, N, BLOCK, BLOCK)
    bits = magnitude(v.to(tl.float32))
    if SQUARE:
        scale = scale_of(tl.max(bits), TARGET, POWER_OF_TWO)
        inverse = tl.div_rn(1.0, scale)
        if data is not None:
            tl.store(scale_inv + index, inverse)
            store(v, scale, data, rows, cols, mask, N, TARGET)
        if data_t is not None:
            tl.store(scale_inv_t + index % across * down + index // across, inverse)
            store_t(v, scale, data_t, rows, cols, mask, M, TARGET)
        if counts is not None:
            publish(bits, tally(bits, scale, TARGET), None, counts)
    else:
        if data is not None:
            by_row = scale_of(tl.max(bits, 1), TARGET, POWER_OF_TWO)
            to = scale_inv + rows.to(tl.int64) * across + index % across
            tl.store(to, tl.div_rn(1.0, by_row), mask=rows < M)
            store(v, by_row[:, None], data, rows, cols, mask, N, TARGET)
            if counts is not None:
                publish(bits, tally(bits, by_row[:, None], TARGET), None, counts)
        if data_t is not None:
            if data is not None:  # again, from the L1: kept, it would take the registers of a second program
                v, rows, cols, mask = load_tile(x, index, stride, M, N, BLOCK, BLOCK)
                bits = magnitude(v.to(tl.float32))
            by_column = scale_of(tl.max(bits, 0), TARGET, POWER_OF_TWO)
            to = scale_inv_t + cols.to(tl.int64) * down + index // across
            tl.store(to, tl.div_rn(1.0, by_column), mask=cols < N)
            store_t(v, by_column[:, None], data_t, rows, cols, mask, M, TARGET)
            if counts is not None and data is None:
                publish(bits, tally(bits, by_column[None, :], TARGET), None, counts)


def per_row(
    x: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    counts: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """data, data_t, scale_inv, scale_inv_t of x, (M, N) and not empty."""
    x = rows_contiguous(x)
    m, n = x.shape
    stride, grid, device = x.stride(0), -(-m // ROWS) * -(-n // COLUMNS), x.get_device()
    amaxes = torch.zeros(m + n, dtype=torch.int32, device=x.device)
    key = (*traits(x), stride, m, n, rowwise, columnwise)
    constants = {"ROWWISE": rowwise, "COLUMNWISE": columnwise, **TILE}
    launch(_line_amax_kernel, grid, key, device, (x, amaxes, stride, m, n), constants)
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    scale_inv = float32(x, m) if rowwise else None
    scale_inv_t = float32(x, n) if columnwise else None
    args = (x, amaxes, data, data_t, scale_inv, scale_inv_t, counts, stride, m, n)
    constants = {"POWER_OF_TWO": power_of_two, "TARGET": FP8[dtype], **TILE}
    launch(_line_cast_kernel, grid, (*key, dtype, power_of_two, counts is None), device, args, constants)
    return data, data_t, scale_inv, scale_inv_t


def per_block(
    x: Tensor,
    dtype: torch.dtype,
    rows: int,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    counts: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """data, data_t, scale_inv, scale_inv_t of x, (M, N) and not empty."""
    x = rows_contiguous(x)
    m, n = x.shape
    stride, down, across = x.stride(0), -(-m // BLOCK), -(-n // BLOCK)
    square = rows == BLOCK
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    scale_inv = float32(x, down if square else m, across) if rowwise else None
    scale_inv_t = float32(x, across if square else n, down) if columnwise else None
    args = (x, data, data_t, scale_inv, scale_inv_t, counts, stride, m, n)
    key = (*traits(x), stride, m, n, rowwise, columnwise, square, dtype, power_of_two, counts is None)
    constants = {
        "SQUARE": square,
        "POWER_OF_TWO": power_of_two,
        "TARGET": FP8[dtype],
        "BLOCK": BLOCK,
        "num_warps": WARPS,
    }
    launch(_block_kernel, down * across, key, x.get_device(), args, constants)
    return data, data_t, scale_inv, scale_inv_t
