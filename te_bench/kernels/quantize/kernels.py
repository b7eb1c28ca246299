# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton kernels of the quantisers with one scale, and their launchers; scales per row or block: fine_kernels.py.

They are memory-bound: a bf16 element is 2 bytes read and 2 written; `tensor` and `row` read it twice, the second time
backwards, because the data read last is still in the L2 (50 MB on an H200). At an H200's 4 TB/s an element has time for
about 14 integer instructions, so each is cast once for both layouts: rows 2i and 2i + 1 are two tiles, and a byte of
each makes the 16 bits that ldmatrix transposes. An amax is gathered as the maximum of the bits of |x|, which sort as
the numbers do, with infinity above them and NaN above infinity, so the order does not matter.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.launch import allocator, launch, rows_contiguous
from te_bench.kernels.quantize import TENSOR, Layout, Quantized
from te_bench.kernels.tile import (
    FLOATS,
    FP8,
    add,
    empty_pair,
    fits_range,
    larger,
    magnitude,
    publish,
    publish_underflows,
    read_amax,
    rounded_by_twos,
    tally,
    to_fp8,
    zip_bytes,
)

# Tile of the casts: 64 columns are 128 bytes of bf16 read, 128 rows 128 bytes of the transposed layout written. A
# thread has VECTOR columns of a row: 8 are 16 bytes of half precision read, 8 bytes written. From H200 sweeps.
TILE: dict[str, Any] = {"ROWS": 128, "COLUMNS": 64, "VECTOR": 8, "POLICY": "", "num_warps": 4}
# For x's own amax: evict written data first from the L2, so that x, just read, stays.
OWN_SCALE: dict[str, Any] = {**TILE, "POLICY": "evict_first", "maxnreg": 64}
# With float32 column sums, or two matrices: more values to keep need more threads.
GATHERING: dict[str, Any] = {**TILE, "num_warps": 8}
COUNTING: dict[str, Any] = {**TILE, "ROWS": 64, "COLUMNS": 128, "num_warps": 8}
PAIR = {dtype: {"TARGET": target, **GATHERING} for dtype, target in FP8.items()}
# Tile of an amax pass, which keeps nothing else.
AMAX_TILE: dict[str, Any] = {"ROWS": 128, "COLUMNS": 64, "num_warps": 8}
SUM_ROWS, SUM_COLUMNS = 64, 32  # tile of the second stage of the column sums
# Scalars or views into tables of scalars: do not compile for each alignment.
UNALIGNED = [
    "scale",
    "amax",
    "counts",
    "scale_inv",
    "column_sum",
    "amaxes",
    "scales",
    "w_scale",
    "w_amax",
    "w_scale_inv",
]


@triton.jit
def scale_of(bits, TARGET: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return the reference's scale_from_amax of an amax's bits."""
    usable = (bits > 0) & (bits < 0x7F800000)
    if POWER_OF_TWO:
        # No division: the limits are 1.75 x 2^8 and 1.75 x 2^15; 1.75 over a mantissa never rounds to a power of two.
        TOP: tl.constexpr = 262 if tl.float8e4nv == TARGET else 269
        exponent = tl.minimum(TOP - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 254)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        LIMIT: tl.constexpr = 448.0 if tl.float8e4nv == TARGET else 57344.0
        amax = tl.where(usable, bits, 0x3F800000).to(tl.float32, bitcast=True)
        scale = tl.minimum(tl.div_rn(LIMIT, amax), 3.4028234663852886e38)
    return tl.where(usable, scale, 1.0)


@triton.jit
def inverse_of(scale, POWER_OF_TWO: tl.constexpr):
    """Return 1 / scale; for a power of two, from 2^-126 to 2^127, without a division."""
    if POWER_OF_TWO:
        exponent = 254 - (scale.to(tl.int32, bitcast=True) >> 23)
        return tl.where(exponent > 0, exponent << 23, 0x400000).to(tl.float32, bitcast=True)  # the last is 2^-127
    else:
        return tl.div_rn(1.0, scale)


@triton.jit
def load_tile(x, index, stride, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the index-th tile of x, its rows and its columns; 0 beyond the edges."""
    across = tl.cdiv(N, COLUMNS)
    rows = index // across * ROWS + tl.arange(0, ROWS)
    cols = index % across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    v = tl.load(x + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    return v, rows, cols


@triton.jit
def load_pairs(x, index, stride, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr):
    """Return rows 2i and rows 2i + 1 of the index-th tile of x, the numbers of the former, and the columns."""
    across = tl.cdiv(N, COLUMNS)
    rows = index // across * ROWS + 2 * tl.arange(0, ROWS // 2)
    cols = tl.max_contiguous(index % across * COLUMNS + tl.arange(0, COLUMNS), [VECTOR])  # VECTOR of them a thread
    col_mask = (cols < N)[None, :]
    at = x + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    a = tl.load(at, mask=(rows < M)[:, None] & col_mask, other=0.0)
    b = tl.load(at + stride, mask=(rows + 1 < M)[:, None] & col_mask, other=0.0)
    return a, b, rows, cols


@triton.jit
def cast(v, scale, TARGET: tl.constexpr):
    """Return the byte of fp8(v * scale); scale (), (rows, 1) or (1, columns)."""
    return to_fp8(v.to(tl.float32) * scale, TARGET).to(tl.uint8, bitcast=True)


@triton.jit
def store(a, b, data, stride, rows, cols, M, N, POLICY: tl.constexpr):
    """Store the bytes a of rows and b of rows + 1 in data (M, N), whose rows are `stride` apart."""
    col_mask = (cols < N)[None, :]
    to = data.to(tl.pointer_type(tl.uint8), bitcast=True) + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    tl.store(to, a, mask=(rows < M)[:, None] & col_mask, eviction_policy=POLICY)
    tl.store(to + stride, b, mask=(rows + 1 < M)[:, None] & col_mask, eviction_policy=POLICY)


@triton.jit
def store_t(a, b, data_t, index, cols, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, POLICY: tl.constexpr):
    """Store the bytes a of rows 2i and b of rows 2i + 1 of the index-th tile, transposed, in data_t (N, M), M even."""
    pairs = index // tl.cdiv(N, COLUMNS) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    lines = (data_t + cols.to(tl.int64)[:, None] * M).to(tl.pointer_type(tl.uint16), bitcast=True)
    mask = (cols < N)[:, None] & (pairs < M // 2)[None, :]
    tl.store(lines + pairs[None, :], tl.trans(zip_bytes(a, b)), mask=mask, eviction_policy=POLICY)


@triton.jit
def store_pairs(
    a, b, scale, data, data_t, index, rows, cols, stride, M, N,
    TARGET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Cast the index-th tile, a its rows 2i and b its rows 2i + 1, into data (row stride `stride`) and data_t."""
    first, second = cast(a, scale, TARGET), cast(b, scale, TARGET)
    if data is not None:
        store(first, second, data, stride, rows, cols, M, N, POLICY)
    if data_t is not None:
        store_t(first, second, data_t, index, cols, M, N, ROWS, COLUMNS, POLICY)


@triton.jit
def publish_excesses(
    x, scale, counts, index, stride, M, N,
    TARGET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VIA: tl.constexpr,
):  # fmt: skip
    """Add to counts the elements of the index-th tile of x that saturate or are not finite.

    This is rare, so the tile is read again by parts; otherwise it would take a whole program's registers.
    """
    PARTS: tl.constexpr = 8
    across = tl.cdiv(N, COLUMNS)
    first = index // across * PARTS * across + index % across
    tallies = tl.zeros((ROWS // PARTS, COLUMNS), tl.int32)
    for part in tl.range(PARTS):
        v, _, _ = load_tile(x, first + part * across, stride, M, N, ROWS // PARTS, COLUMNS)
        v = v.to(tl.float32)
        if VIA is not None:
            v = rounded_by_twos(v, VIA).to(tl.float32)
        tallies += tally(magnitude(v), scale, TARGET)
    add(counts, tl.sum(tallies & 0x3FF))
    add(counts + 2, tl.sum(tallies >> 20))


@triton.jit
def _amax_kernel(x, amaxes, stride, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the largest bits of a program's share of x's tiles to amaxes[program]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    largest = tl.zeros((ROWS, COLUMNS), x.dtype.element_ty)
    for index in tl.range(program, tl.cdiv(M, ROWS) * tl.cdiv(N, COLUMNS), programs):
        v, _, _ = load_tile(x, index, stride, M, N, ROWS, COLUMNS)
        largest = larger(largest, v)
    tl.store(amaxes + program, tl.max(magnitude(largest.to(tl.float32))))


@triton.jit
def _cast_tile(
    x, scale, data, data_t, scale_inv, amax, counts, sums, index, stride, M, N,
    TARGET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, POLICY: tl.constexpr,
    VIA: tl.constexpr,
):  # fmt: skip
    """Cast the index-th tile of x, first rounded to VIA unless None; add to amax, counts and column sums."""
    before = 0
    if amax is not None:
        before = read_amax(amax)
    a, b, rows, cols = load_pairs(x, index, stride, M, N, ROWS, COLUMNS, VECTOR)
    if VIA is not None:
        a, b = rounded_by_twos(a.to(tl.float32), VIA), rounded_by_twos(b.to(tl.float32), VIA)
    if index == 0:
        tl.store(scale_inv, tl.div_rn(1.0, scale))
    store_pairs(a, b, scale, data, data_t, index, rows, cols, N, M, N, TARGET, ROWS, COLUMNS, POLICY)
    if sums is not None:
        to = sums + (index // tl.cdiv(N, COLUMNS)).to(tl.int64) * N + cols
        tl.store(to, tl.sum(a.to(tl.float32) + b.to(tl.float32), 0), mask=cols < N)
    if amax is not None or counts is not None:
        bits = magnitude(larger(a, b).to(tl.float32))
        publish(bits, None, amax, None, before)
        if counts is not None:
            publish_underflows(a, b, scale, counts, TARGET)
            if not fits_range(bits, scale, TARGET):
                publish_excesses(x, scale, counts, index, stride, M, N, TARGET, ROWS, COLUMNS, VIA)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _cast_kernel(
    x, scale, amaxes, data, data_t, scale_inv, amax, counts, sums, stride, M, N,
    SHARES: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    TARGET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, POLICY: tl.constexpr,
    VIA: tl.constexpr,
):  # fmt: skip
    """Cast one tile per program, by the given scale or, if None, by that of _amax_kernel's SHARES amaxes."""
    index = tl.program_id(0)
    if scale is None:
        index = tl.num_programs(0) - 1 - index
        factor = scale_of(tl.max(tl.load(amaxes + tl.arange(0, SHARES))), TARGET, POWER_OF_TWO)
    else:
        factor = tl.load(scale)
    _cast_tile(
        x, factor, data, data_t, scale_inv, amax, counts, sums, index, stride, M, N,
        TARGET, ROWS, COLUMNS, VECTOR, POLICY, VIA,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _pair_kernel(
    x, scale, data, data_t, scale_inv, amax,
    w, w_scale, w_data, w_data_t, w_scale_inv, w_amax,
    stride, M, w_stride, N, K,
    TARGET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Cast x (M, K) in the first programs and w (N, K) in the others."""
    index, tiles = tl.program_id(0), tl.cdiv(M, ROWS) * tl.cdiv(K, COLUMNS)
    if index < tiles:
        _cast_tile(
            x, tl.load(scale), data, data_t, scale_inv, amax, None, None, index, stride, M, K,
            TARGET, ROWS, COLUMNS, VECTOR, POLICY, None,
        )  # fmt: skip
    else:
        index -= tiles
        _cast_tile(
            w, tl.load(w_scale), w_data, w_data_t, w_scale_inv, w_amax, None, None, index, w_stride, N, K,
            TARGET, ROWS, COLUMNS, VECTOR, POLICY, None,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _add_kernel(sums, column_sum, shares, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the sum over the rows of sums (shares, N) to column_sum (N,), in the same order in every run."""
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
    """Return _amax_kernel's programs, a power of two: about 4 per SM; 4 on a CPU, to test the loop."""
    return int(triton.next_power_of_2(3 * architecture.processors(device)))


def float32(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def add_sums(sums: Tensor, column_sum: Tensor) -> None:
    """Add the sum over the rows of sums (bands, N) to column_sum (N,)."""
    bands, n = sums.shape
    constants = {"ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS}
    grid = -(-n // SUM_COLUMNS)
    launch(_add_kernel, grid, (bands, n), sums.get_device(), (sums, column_sum, bands, n), constants)


def _tile(x: Tensor, own: bool, counts: Tensor | None, column_sum: Tensor | None) -> dict[str, Any]:
    if x.dtype is torch.float32:
        return GATHERING
    if column_sum is not None:
        return GATHERING if counts is None else TILE
    if counts is not None:
        return COUNTING
    return OWN_SCALE if own else TILE


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
    via: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return data, data_t, scale_inv of nonempty x (M, N), with the given scale or that of its own amax.

    M must be even if columnwise, also in `pair` and fine_kernels.py.
    """
    x = rows_contiguous(x)
    m, n = x.shape
    tile = _tile(x, scale is None, counts, column_sum)
    stride, down = x.stride(0), -(-m // tile["ROWS"])
    device = x.get_device()
    key = (x.dtype, stride, m, n, x.data_ptr() % 16)
    shares, amaxes = 1, None
    if scale is None:
        shares = _shares(x.device)
        amaxes = torch.empty(shares, dtype=torch.int32, device=x.device)
        launch(_amax_kernel, shares, key, device, (x, amaxes, stride, m, n), AMAX_TILE)
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    scale_inv = float32(x)
    sums = None if column_sum is None else float32(x, down, n)
    absent = (scale is None, amax is None, counts is None, sums is None, rowwise, columnwise)
    constants = {
        "SHARES": shares,
        "POWER_OF_TWO": power_of_two,
        "TARGET": FP8[dtype],
        "VIA": None if via is None else FLOATS[via],
        **tile,
    }
    args = (x, scale, amaxes, data, data_t, scale_inv, amax, counts, sums, stride, m, n)
    kind = (*key, dtype, power_of_two, via, *absent)
    launch(_cast_kernel, down * -(-n // tile["COLUMNS"]), kind, device, args, constants)
    if column_sum is not None and sums is not None:
        add_sums(sums, column_sum)
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
    """Cast nonempty x (M, K) and w (N, K), each by its scale and always rowwise, in one launch to save host time."""
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
    rows, columns = GATHERING["ROWS"], GATHERING["COLUMNS"]
    grid = (-(-m // rows) + -(-n // rows)) * -(-k // columns)
    launch(_pair_kernel, grid, key, device, args, PAIR[dtype])
    layout = Layout(dtype, TENSOR, torch.float32)
    return (
        Quantized(data, scale_inv, data_t, scale_inv if columnwise else None, layout),
        Quantized(w_data, w_scale_inv, w_data_t, w_scale_inv if w_columnwise else None, layout),
    )
