# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The quantisers' Triton kernels and their launchers.

Bound by memory: an element of bf16 is 2 bytes read and 2 written; `tensor` and `row` read it twice, the second time
backwards, for what the first pass read last is still in the L2 (50 MB on an H200). An amax is gathered as the maximum of the
bits of |x|, which sort as the numbers do, infinity above them and NaN above infinity: its result is the same in any order.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels._epilogue import FP8, empty_pair, magnitude, publish, tally, to_fp8
from te_bench.kernels._launch import launch
from te_bench.kernels.quantize import BLOCK, Quantized

# Tile of the casts: 64 columns are 128 bytes of bf16 read, 128 rows 128 bytes of the transposed layout written.
ROWS, COLUMNS, WARPS = 128, 64, 8
TILE = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
SUM_ROWS, SUM_COLUMNS = 64, 32  # tile of the second stage of the column sums
# What programs share is one number, or a view into a table of them: not worth a compilation for each alignment.
UNALIGNED = ["scale", "amax", "counts", "scale_inv", "column_sum", "amaxes", "w_scale", "w_amax", "w_scale_inv"]


@triton.jit
def _scale(bits, TARGET: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """scale_from_amax of the reference, of an amax's bits."""
    LIMIT: tl.constexpr = 448.0 if tl.float8e4nv == TARGET else 57344.0
    usable = (bits > 0) & (bits < 0x7F800000)
    amax = tl.where(usable, bits, 0x3F800000).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.div_rn(LIMIT, amax), 3.4028234663852886e38)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(usable, scale, 1.0)


@triton.jit
def _tile(x, index, stride, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The index-th tile of x, its rows, its columns and which of it is there; 0 beyond the edges."""
    across = tl.cdiv(N, COLUMNS)
    rows = index // across * ROWS + tl.arange(0, ROWS)
    cols = index % across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    v = tl.load(x + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    return v, rows, cols, mask


@triton.jit
def _store(v, scale, data, rows, cols, mask, N, TARGET: tl.constexpr):
    """data (M, N) := fp8(v * scale); scale (), or (rows, 1)."""
    tl.store(data + rows.to(tl.int64)[:, None] * N + cols[None, :], to_fp8(v.to(tl.float32) * scale, TARGET), mask=mask)


@triton.jit
def _store_t(v, scale, data_t, rows, cols, mask, M, TARGET: tl.constexpr):
    """data_t (N, M) := fp8(v * scale) transposed; scale (), or (columns, 1)."""
    # Transposed before the cast: ldmatrix moves 16-bit elements, bytes would go one by one through shared memory.
    q = to_fp8(tl.trans(v).to(tl.float32) * scale, TARGET)
    tl.store(data_t + cols.to(tl.int64)[:, None] * M + rows[None, :], q, mask=tl.trans(mask))


@triton.jit
def _amax_kernel(x, amaxes, stride, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """amaxes[program]: the largest bits of its share of x's tiles."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for index in tl.range(program, tl.cdiv(M, ROWS) * tl.cdiv(N, COLUMNS), programs):
        v, _, _, _ = _tile(x, index, stride, M, N, ROWS, COLUMNS)
        largest = tl.maximum(largest, magnitude(v.to(tl.float32)))
    tl.store(amaxes + program, tl.max(largest))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _cast_kernel(
    x,
    scale,
    amaxes,
    data,
    data_t,
    scale_inv,
    amax,
    counts,
    sums,
    stride,
    M,
    N,
    SHARES: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TARGET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile a program, by a scale given or, where that is None, taken from the SHARES amaxes of _amax_kernel."""
    index = tl.program_id(0)
    if scale is None:
        index = tl.num_programs(0) - 1 - index
    v, rows, cols, mask = _tile(x, index, stride, M, N, ROWS, COLUMNS)
    if scale is None:
        factor = _scale(tl.max(tl.load(amaxes + tl.arange(0, SHARES))), TARGET, POWER_OF_TWO)
    else:
        factor = tl.load(scale)
    if index == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
    if data is not None:
        _store(v, factor, data, rows, cols, mask, N, TARGET)
    if data_t is not None:
        _store_t(v, factor, data_t, rows, cols, mask, M, TARGET)
    if sums is not None:
        tl.store(
            sums + (index // tl.cdiv(N, COLUMNS)).to(tl.int64) * N + cols, tl.sum(v.to(tl.float32), 0), mask=cols < N
        )
    if amax is not None or counts is not None:
        bits = magnitude(v.to(tl.float32))
        publish(bits, tally(bits, factor, TARGET), amax, counts)


@triton.jit
def _cast_tile(
    x, scale, data, data_t, scale_inv, amax, index, stride, M, N,
    TARGET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The index-th tile of _cast_kernel with a given scale and nothing but an amax to gather."""
    v, rows, cols, mask = _tile(x, index, stride, M, N, ROWS, COLUMNS)
    factor = tl.load(scale)
    if index == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
    _store(v, factor, data, rows, cols, mask, N, TARGET)
    if data_t is not None:
        _store_t(v, factor, data_t, rows, cols, mask, M, TARGET)
    if amax is not None:
        publish(magnitude(v.to(tl.float32)), None, amax, None)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _pair_kernel(
    x, scale, data, data_t, scale_inv, amax,
    w, w_scale, w_data, w_data_t, w_scale_inv, w_amax,
    stride, M, w_stride, N, K,
    TARGET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x (M, K) by the first programs and w (N, K) by the others."""
    index, tiles = tl.program_id(0), tl.cdiv(M, ROWS) * tl.cdiv(K, COLUMNS)
    if index < tiles:
        _cast_tile(x, scale, data, data_t, scale_inv, amax, index, stride, M, K, TARGET, ROWS, COLUMNS)
    else:
        index -= tiles
        _cast_tile(w, w_scale, w_data, w_data_t, w_scale_inv, w_amax, index, w_stride, N, K, TARGET, ROWS, COLUMNS)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _add_kernel(sums, column_sum, shares, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """column_sum (N,) += the sum over sums' (shares, N) rows, in the same order in every run."""
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, shares, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < shares)[:, None] & (cols < N)[None, :]
        total += tl.load(sums + rows.to(tl.int64)[:, None] * N + cols[None, :], mask=mask, other=0.0)
    before = tl.load(column_sum + cols, mask=cols < N, other=0.0)
    tl.store(column_sum + cols, before + tl.sum(total, 0), mask=cols < N)


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
    v, rows, cols, _ = _tile(x, tl.program_id(0), stride, M, N, ROWS, COLUMNS)
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
    v, rows, cols, mask = _tile(x, index, stride, M, N, ROWS, COLUMNS)
    bits = magnitude(v.to(tl.float32))
    if data is not None:
        by_row = _scale(tl.load(amaxes + rows, mask=rows < M, other=0), TARGET, POWER_OF_TWO)
        if index % tl.cdiv(N, COLUMNS) == 0:
            tl.store(scale_inv + rows, tl.div_rn(1.0, by_row), mask=rows < M)
        _store(v, by_row[:, None], data, rows, cols, mask, N, TARGET)
        if counts is not None:
            publish(bits, tally(bits, by_row[:, None], TARGET), None, counts)
    if data_t is not None:
        by_column = _scale(tl.load(amaxes + M + cols, mask=cols < N, other=0), TARGET, POWER_OF_TWO)
        if index < tl.cdiv(N, COLUMNS):
            tl.store(scale_inv_t + cols, tl.div_rn(1.0, by_column), mask=cols < N)
        _store_t(v, by_column[:, None], data_t, rows, cols, mask, M, TARGET)
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
    v, rows, cols, mask = _tile(x, index, stride, M, N, BLOCK, BLOCK)
    bits = magnitude(v.to(tl.float32))
    if SQUARE:
        scale = _scale(tl.max(bits), TARGET, POWER_OF_TWO)
        inverse = tl.div_rn(1.0, scale)
        if data is not None:
            tl.store(scale_inv + index, inverse)
            _store(v, scale, data, rows, cols, mask, N, TARGET)
        if data_t is not None:
            tl.store(scale_inv_t + index % across * down + index // across, inverse)
            _store_t(v, scale, data_t, rows, cols, mask, M, TARGET)
        if counts is not None:
            publish(bits, tally(bits, scale, TARGET), None, counts)
    else:
        if data is not None:
            by_row = _scale(tl.max(bits, 1), TARGET, POWER_OF_TWO)
            to = scale_inv + rows.to(tl.int64) * across + index % across
            tl.store(to, tl.div_rn(1.0, by_row), mask=rows < M)
            _store(v, by_row[:, None], data, rows, cols, mask, N, TARGET)
            if counts is not None:
                publish(bits, tally(bits, by_row[:, None], TARGET), None, counts)
        if data_t is not None:
            if data is not None:  # again, from the L1: kept, it would take the registers of a second program
                v, rows, cols, mask = _tile(x, index, stride, M, N, BLOCK, BLOCK)
                bits = magnitude(v.to(tl.float32))
            by_column = _scale(tl.max(bits, 0), TARGET, POWER_OF_TWO)
            to = scale_inv_t + cols.to(tl.int64) * down + index // across
            tl.store(to, tl.div_rn(1.0, by_column), mask=cols < N)
            _store_t(v, by_column[:, None], data_t, rows, cols, mask, M, TARGET)
            if counts is not None and data is None:
                publish(bits, tally(bits, by_column[None, :], TARGET), None, counts)


@functools.cache
def _shares(device: torch.device) -> int:
    """Programs of _amax_kernel, a power of two: about 4 an SM; 4 on a CPU, so that the interpreter tries the loop."""
    if device.type != "cuda":
        return 4
    return int(triton.next_power_of_2(3 * torch.cuda.get_device_properties(device).multi_processor_count))


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _float32(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def per_tensor(
    x: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    amax: Tensor | None,
    counts: Tensor | None,
    column_sum: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """data, data_t, scale_inv of x, (M, N) and not empty, with the scale given or with that of its own amax."""
    x = _rows_contiguous(x)
    m, n = x.shape
    stride, down = x.stride(0), -(-m // ROWS)
    device = x.device.index if x.is_cuda else None
    key = (x.dtype, stride, m, n, x.data_ptr() % 16)
    shares, amaxes = 1, None
    if scale is None:
        shares = _shares(x.device)
        amaxes = torch.empty(shares, dtype=torch.int32, device=x.device)
        launch(_amax_kernel, shares, key, device, (x, amaxes, stride, m, n), TILE)
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    scale_inv = _float32(x)
    sums = None if column_sum is None else _float32(x, down, n)
    absent = (scale is None, amax is None, counts is None, sums is None, rowwise, columnwise)
    constants = {"SHARES": shares, "POWER_OF_TWO": power_of_two, "TARGET": FP8[dtype], **TILE}
    args = (x, scale, amaxes, data, data_t, scale_inv, amax, counts, sums, stride, m, n)
    kind = (*key, dtype, power_of_two, *absent)
    launch(_cast_kernel, down * -(-n // COLUMNS), kind, device, args, constants)
    if column_sum is not None:
        constants = {"ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS}
        launch(_add_kernel, -(-n // SUM_COLUMNS), (down, n), device, (sums, column_sum, down, n), constants)
    return data, data_t, scale_inv


def pair(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    w_amax: Tensor | None,
    dtype: torch.dtype,
    columnwise: bool,
    w_columnwise: bool,
) -> tuple[Quantized, Quantized]:
    """x (M, K) and w (N, K), not empty, K contiguous, each by its scale, data always: one launch for the host to pay."""
    m, k = x.shape
    n = w.shape[0]
    data, data_t = empty_pair(m, k, x, dtype, True, columnwise)
    w_data, w_data_t = empty_pair(n, k, w, dtype, True, w_columnwise)
    scale_inv, w_scale_inv = scale.new_empty_strided((2,), (4,)).unbind()  # 16 bytes apart, as cuBLASLt wants them
    stride, w_stride = x.stride(0), w.stride(0)
    aligned = x.data_ptr() % 16, w.data_ptr() % 16
    args = (
        x, scale, data, data_t, scale_inv, amax, w, w_scale, w_data, w_data_t, w_scale_inv, w_amax,
        stride, m, w_stride, n, k,
    )  # fmt: skip
    absent = (amax is None, w_amax is None, columnwise, w_columnwise)
    key = (x.dtype, w.dtype, stride, m, w_stride, n, k, aligned, dtype, absent)
    grid = (-(-m // ROWS) + -(-n // ROWS)) * -(-k // COLUMNS)
    launch(_pair_kernel, grid, key, x.get_device() if x.is_cuda else None, args, {"TARGET": FP8[dtype], **TILE})
    return (
        Quantized(data, scale_inv, data_t, scale_inv if columnwise else None),
        Quantized(w_data, w_scale_inv, w_data_t, w_scale_inv if w_columnwise else None),
    )


def per_row(
    x: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    counts: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """data, data_t, scale_inv, scale_inv_t of x, (M, N) and not empty."""
    x = _rows_contiguous(x)
    m, n = x.shape
    stride, grid = x.stride(0), (triton.cdiv(m, ROWS) * triton.cdiv(n, COLUMNS),)
    amaxes = torch.zeros(m + n, dtype=torch.int32, device=x.device)
    _line_amax_kernel[grid](
        x, amaxes, stride, m, n, ROWWISE=rowwise, COLUMNWISE=columnwise, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    scale_inv = _float32(x, m) if rowwise else None
    scale_inv_t = _float32(x, n) if columnwise else None
    _line_cast_kernel[grid](
        x, amaxes, data, data_t, scale_inv, scale_inv_t, counts, stride, m, n,
        POWER_OF_TWO=power_of_two, TARGET=FP8[dtype], ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
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
    x = _rows_contiguous(x)
    m, n = x.shape
    down, across = triton.cdiv(m, BLOCK), triton.cdiv(n, BLOCK)
    square = rows == BLOCK
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    scale_inv = _float32(x, down if square else m, across) if rowwise else None
    scale_inv_t = _float32(x, across if square else n, down) if columnwise else None
    _block_kernel[(down * across,)](
        x, data, data_t, scale_inv, scale_inv_t, counts, x.stride(0), m, n,
        SQUARE=square, POWER_OF_TWO=power_of_two, TARGET=FP8[dtype], BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return data, data_t, scale_inv, scale_inv_t
