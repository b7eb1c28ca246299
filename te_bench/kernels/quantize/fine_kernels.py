# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton kernels and launchers of the quantisers with a scale per row or per block."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.launch import launch, rows_contiguous, traits
from te_bench.kernels.quantize import BLOCK
from te_bench.kernels.quantize.kernels import (
    UNALIGNED,
    cast,
    float32,
    inverse_of,
    load_pairs,
    load_tile,
    publish_excesses,
    scale_of,
    store,
    store_t,
)
from te_bench.kernels.tile import (
    FP8,
    empty_pair,
    fits_range,
    larger,
    magnitude,
    publish,
    publish_underflows,
    tally,
)

# Tiles of the casts by rows and of their amax pass; of 128 x 128 with one scale, and with one per row and column.
CAST_TILE: dict[str, Any] = {"ROWS": 128, "COLUMNS": 64, "VECTOR": 8, "POLICY": "evict_first", "num_warps": 8}
AMAX_TILE: dict[str, Any] = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4}
LINES_A_PROGRAM = 256  # lines for which a program computes scales
SQUARE: dict[str, Any] = {"BLOCK": BLOCK, "VECTOR": 8, "POLICY": "", "num_warps": 8, "maxnreg": 64}
BLOCKS: dict[str, Any] = {"BLOCK": BLOCK, "VECTOR": 16, "POLICY": "", "num_warps": 8}


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
    """Compute amaxes, initially 0: the largest bits of each of the M rows, then of each of the N columns."""
    v, rows, cols = load_tile(x, tl.program_id(0), stride, M, N, ROWS, COLUMNS)
    bits = magnitude(v.to(tl.float32))
    if ROWWISE:
        tl.atomic_max(amaxes + rows, tl.max(bits, 1), mask=rows < M, sem="relaxed")
    if COLUMNWISE:
        tl.atomic_max(amaxes + M + cols, tl.max(bits, 0), mask=cols < N, sem="relaxed")


@triton.jit
def _line_scale_kernel(
    amaxes, scale_inv, scale_inv_t, M, N,
    TARGET: tl.constexpr, POWER_OF_TWO: tl.constexpr, LINES_A_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Replace amaxes' bits by their scales, and write the inverses: once per line, not in each tile of the cast."""
    line = tl.program_id(0) * LINES_A_PROGRAM + tl.arange(0, LINES_A_PROGRAM)
    scale = scale_of(tl.load(amaxes + line, mask=line < M + N, other=0), TARGET, POWER_OF_TWO)
    tl.store(amaxes + line, scale.to(tl.int32, bitcast=True), mask=line < M + N)
    inverse = inverse_of(scale, POWER_OF_TWO)
    if scale_inv is not None:
        tl.store(scale_inv + line, inverse, mask=line < M)
    if scale_inv_t is not None:
        tl.store(scale_inv_t + (line - M), inverse, mask=(line >= M) & (line < M + N))


@triton.jit
def _tally(a, b, a_scale, b_scale, counts, TARGET: tl.constexpr):
    """Add the statistics of the tiles a and b, with their scales, to counts."""
    a_bits, b_bits = magnitude(a.to(tl.float32)), magnitude(b.to(tl.float32))
    publish(a_bits, tally(a_bits, a_scale, TARGET) + tally(b_bits, b_scale, TARGET), None, counts)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _line_cast_kernel(
    x,
    scales,
    data,
    data_t,
    counts,
    stride,
    M,
    N,
    TARGET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Cast one tile per program, by _line_scale_kernel's scales: of the M rows, then of the N columns."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    a, b, rows, cols = load_pairs(x, index, stride, M, N, ROWS, COLUMNS, VECTOR)
    if data is not None:
        a_scale = tl.load(scales + rows, mask=rows < M, other=1.0)[:, None]
        b_scale = tl.load(scales + rows + 1, mask=rows + 1 < M, other=1.0)[:, None]
        first, second = cast(a, a_scale, TARGET), cast(b, b_scale, TARGET)
        store(first, second, data, N, rows, cols, M, N, POLICY)
        if counts is not None:
            _tally(a, b, a_scale, b_scale, counts, TARGET)
    if data_t is not None:
        scale = tl.load(scales + M + cols, mask=cols < N, other=1.0)[None, :]
        first, second = cast(a, scale, TARGET), cast(b, scale, TARGET)
        store_t(first, second, data_t, index, cols, M, N, ROWS, COLUMNS, POLICY)
        if counts is not None and data is None:
            _tally(a, b, scale, scale, counts, TARGET)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _tile_kernel(
    x,
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
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Cast a BLOCK x BLOCK tile per program, with one scale."""
    index = tl.program_id(0)
    across, down = tl.cdiv(N, BLOCK), tl.cdiv(M, BLOCK)
    a, b, rows, cols = load_pairs(x, index, stride, M, N, BLOCK, BLOCK, VECTOR)
    bits = magnitude(larger(a, b).to(tl.float32))
    scale = scale_of(tl.max(bits), TARGET, POWER_OF_TWO)
    inverse = inverse_of(scale, POWER_OF_TWO)
    first, second = cast(a, scale, TARGET), cast(b, scale, TARGET)
    if data is not None:
        tl.store(scale_inv + index, inverse)
        store(first, second, data, N, rows, cols, M, N, POLICY)
    if data_t is not None:
        tl.store(scale_inv_t + index % across * down + index // across, inverse)
        store_t(first, second, data_t, index, cols, M, N, BLOCK, BLOCK, POLICY)
    if counts is not None:
        publish_underflows(a, b, scale, counts, TARGET)
        if not fits_range(bits, scale, TARGET):
            publish_excesses(x, scale, counts, index, stride, M, N, TARGET, BLOCK, BLOCK, None)


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
    POWER_OF_TWO: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Cast a BLOCK x BLOCK tile per program, with a scale per row for data and per column for data_t.

    scale_inv (blocks, M), scale_inv_t (blocks, N): contiguous along a line, as cuBLASLt reads them.
    """
    index = tl.program_id(0)
    across = tl.cdiv(N, BLOCK)
    a, b, rows, cols = load_pairs(x, index, stride, M, N, BLOCK, BLOCK, VECTOR)
    if data is not None:
        a_scale = scale_of(tl.max(magnitude(a.to(tl.float32)), 1), TARGET, POWER_OF_TWO)
        b_scale = scale_of(tl.max(magnitude(b.to(tl.float32)), 1), TARGET, POWER_OF_TWO)
        to = scale_inv + (index % across).to(tl.int64) * M + rows
        tl.store(to, inverse_of(a_scale, POWER_OF_TWO), mask=rows < M)
        tl.store(to + 1, inverse_of(b_scale, POWER_OF_TWO), mask=rows + 1 < M)
        first, second = cast(a, a_scale[:, None], TARGET), cast(b, b_scale[:, None], TARGET)
        store(first, second, data, N, rows, cols, M, N, POLICY)
        if counts is not None:
            _tally(a, b, a_scale[:, None], b_scale[:, None], counts, TARGET)
    if data_t is not None:
        scale = scale_of(tl.max(magnitude(larger(a, b).to(tl.float32)), 0), TARGET, POWER_OF_TWO)
        to = scale_inv_t + (index // across).to(tl.int64) * N + cols
        tl.store(to, inverse_of(scale, POWER_OF_TWO), mask=cols < N)
        first, second = cast(a, scale[None, :], TARGET), cast(b, scale[None, :], TARGET)
        store_t(first, second, data_t, index, cols, M, N, BLOCK, BLOCK, POLICY)
        if counts is not None and data is None:
            _tally(a, b, scale[None, :], scale[None, :], counts, TARGET)


def per_row(
    x: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    counts: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return data, data_t, scale_inv, scale_inv_t of nonempty x (M, N)."""
    x = rows_contiguous(x)
    m, n = x.shape
    stride, device = x.stride(0), x.get_device()
    amaxes = torch.zeros(m + n, dtype=torch.int32, device=x.device)
    key = (*traits(x), stride, m, n, rowwise, columnwise)
    constants = {"ROWWISE": rowwise, "COLUMNWISE": columnwise, **AMAX_TILE}
    grid = -(-m // AMAX_TILE["ROWS"]) * -(-n // AMAX_TILE["COLUMNS"])
    launch(_line_amax_kernel, grid, key, device, (x, amaxes, stride, m, n), constants)
    scale_inv = float32(x, m) if rowwise else None
    scale_inv_t = float32(x, n) if columnwise else None
    constants = {"TARGET": FP8[dtype], "POWER_OF_TWO": power_of_two, "LINES_A_PROGRAM": LINES_A_PROGRAM}
    key = (*key, dtype, power_of_two)
    grid = -(-(m + n) // LINES_A_PROGRAM)
    launch(_line_scale_kernel, grid, key, device, (amaxes, scale_inv, scale_inv_t, m, n), constants)
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    args = (x, amaxes.view(torch.float32), data, data_t, counts, stride, m, n)
    constants = {"TARGET": FP8[dtype], **CAST_TILE}
    grid = -(-m // CAST_TILE["ROWS"]) * -(-n // CAST_TILE["COLUMNS"])
    launch(_line_cast_kernel, grid, (*key, counts is None), device, args, constants)
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
    """Return data, data_t, scale_inv, scale_inv_t of nonempty x (M, N); 1 x 128 scales are transposed views."""
    x = rows_contiguous(x)
    m, n = x.shape
    stride, down, across = x.stride(0), -(-m // BLOCK), -(-n // BLOCK)
    square = rows == BLOCK
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    scale_inv = float32(x, *((down, across) if square else (across, m))) if rowwise else None
    scale_inv_t = float32(x, *((across, down) if square else (down, n))) if columnwise else None
    args = (x, data, data_t, scale_inv, scale_inv_t, counts, stride, m, n)
    key = (*traits(x), stride, m, n, rowwise, columnwise, dtype, power_of_two, counts is None)
    constants = {"POWER_OF_TWO": power_of_two, "TARGET": FP8[dtype], **(SQUARE if square else BLOCKS)}
    launch(_tile_kernel if square else _block_kernel, down * across, key, x.get_device(), args, constants)
    if square:
        return data, data_t, scale_inv, scale_inv_t
    by_line = [None if scales is None else scales.t() for scales in (scale_inv, scale_inv_t)]
    return data, data_t, by_line[0], by_line[1]
