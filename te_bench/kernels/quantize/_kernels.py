# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The quantisers' Triton kernels and their launchers, those with one scale; _fine_kernels has a scale a row or a block.

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
from te_bench.kernels._launch import allocator, launch, rows_contiguous
from te_bench.kernels.quantize import Quantized

# Tile of the casts: 64 columns are 128 bytes of bf16 read, 128 rows 128 bytes of the transposed layout written.
ROWS, COLUMNS, WARPS = 128, 64, 8
TILE = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
PAIR = {dtype: {"TARGET": target, **TILE} for dtype, target in FP8.items()}
SUM_ROWS, SUM_COLUMNS = 64, 32  # tile of the second stage of the column sums
# What programs share is one number, or a view into a table of them: not worth a compilation for each alignment.
UNALIGNED = ["scale", "amax", "counts", "scale_inv", "column_sum", "amaxes", "w_scale", "w_amax", "w_scale_inv"]


@triton.jit
def scale_of(bits, TARGET: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """scale_from_amax of the reference, of an amax's bits."""
    LIMIT: tl.constexpr = 448.0 if tl.float8e4nv == TARGET else 57344.0
    usable = (bits > 0) & (bits < 0x7F800000)
    amax = tl.where(usable, bits, 0x3F800000).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.div_rn(LIMIT, amax), 3.4028234663852886e38)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(usable, scale, 1.0)


@triton.jit
def load_tile(x, index, stride, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The index-th tile of x, its rows, its columns and which of it is there; 0 beyond the edges."""
    across = tl.cdiv(N, COLUMNS)
    rows = index // across * ROWS + tl.arange(0, ROWS)
    cols = index % across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    v = tl.load(x + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    return v, rows, cols, mask


@triton.jit
def store(v, scale, data, rows, cols, mask, N, TARGET: tl.constexpr):
    """data (M, N) := fp8(v * scale); scale (), or (rows, 1)."""
    tl.store(data + rows.to(tl.int64)[:, None] * N + cols[None, :], to_fp8(v.to(tl.float32) * scale, TARGET), mask=mask)


@triton.jit
def store_t(v, scale, data_t, rows, cols, mask, M, TARGET: tl.constexpr):
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
        v, _, _, _ = load_tile(x, index, stride, M, N, ROWS, COLUMNS)
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
    v, rows, cols, mask = load_tile(x, index, stride, M, N, ROWS, COLUMNS)
    if scale is None:
        factor = scale_of(tl.max(tl.load(amaxes + tl.arange(0, SHARES))), TARGET, POWER_OF_TWO)
    else:
        factor = tl.load(scale)
    if index == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
    if data is not None:
        store(v, factor, data, rows, cols, mask, N, TARGET)
    if data_t is not None:
        store_t(v, factor, data_t, rows, cols, mask, M, TARGET)
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
    v, rows, cols, mask = load_tile(x, index, stride, M, N, ROWS, COLUMNS)
    factor = tl.load(scale)
    if index == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
    store(v, factor, data, rows, cols, mask, N, TARGET)
    if data_t is not None:
        store_t(v, factor, data_t, rows, cols, mask, M, TARGET)
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


@functools.cache
def _shares(device: torch.device) -> int:
    """Programs of _amax_kernel, a power of two: about 4 an SM; 4 on a CPU, so that the interpreter tries the loop."""
    if device.type != "cuda":
        return 4
    return int(triton.next_power_of_2(3 * torch.cuda.get_device_properties(device).multi_processor_count))


def float32(x: Tensor, *shape: int) -> Tensor:
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
    x = rows_contiguous(x)
    m, n = x.shape
    stride, down = x.stride(0), -(-m // ROWS)
    device = x.get_device()
    key = (x.dtype, stride, m, n, x.data_ptr() % 16)
    shares, amaxes = 1, None
    if scale is None:
        shares = _shares(x.device)
        amaxes = torch.empty(shares, dtype=torch.int32, device=x.device)
        launch(_amax_kernel, shares, key, device, (x, amaxes, stride, m, n), TILE)
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    scale_inv = float32(x)
    sums = None if column_sum is None else float32(x, down, n)
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
    """x (M, K) and w (N, K), not empty, each by its scale, data always: one launch for the host to pay."""
    (stride, step), (w_stride, w_step) = x.stride(), w.stride()
    if step != 1 or w_step != 1:
        x, w = rows_contiguous(x), rows_contiguous(w)
        stride, w_stride = x.stride(0), w.stride(0)
    m, k = x.shape
    n = w.shape[0]
    device = x.get_device()
    empty = allocator(device)
    data, w_data = empty((m, k), (k, 1), dtype), empty((n, k), (k, 1), dtype)
    data_t = empty((k, m), (m, 1), dtype) if columnwise else None
    w_data_t = empty((k, n), (n, 1), dtype) if w_columnwise else None
    scale_inv, w_scale_inv = empty((), (), torch.float32), empty((), (), torch.float32)
    args = (
        x, scale, data, data_t, scale_inv, amax, w, w_scale, w_data, w_data_t, w_scale_inv, w_amax,
        stride, m, w_stride, n, k,
    )  # fmt: skip
    key = (
        x.dtype, w.dtype, x.data_ptr() % 16, w.data_ptr() % 16, stride, m, w_stride, n, k,
        dtype, amax is None, w_amax is None, columnwise, w_columnwise,
    )  # fmt: skip
    grid = (-(-m // ROWS) + -(-n // ROWS)) * -(-k // COLUMNS)
    launch(_pair_kernel, grid, key, device, args, PAIR[dtype])
    return (
        Quantized(data, scale_inv, data_t, scale_inv if columnwise else None),
        Quantized(w_data, w_scale_inv, w_data_t, w_scale_inv if w_columnwise else None),
    )
