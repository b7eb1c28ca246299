# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton forward kernels of a norm in a residual stream, and their launcher.

Stream and branch are added, normalised and rounded while a row is in registers. For FP8 it works by tiles: first the
sum and its statistics, then norm and cast. The sum, just written, is read from the L2, and 32 rows fill whole sectors
of the transposed layout. Wide rows use two kernels, because 32 rows a program give too few programs. Measured times:
benchmarks/NOTES.md.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.launch import launch, rows_contiguous, traits
from te_bench.kernels.norm.kernels import UNALIGNED, constants_of, inverse_root, load_parameter, normalize_rows
from te_bench.kernels.quantize.kernels import float32, load_pairs, store_pairs
from te_bench.kernels.tile import FP8, empty_pair, larger, magnitude, publish, read_amax, rounded, tally

# Elements and warps of a program: 8 whole rows of 768, 56 registers a thread, 2 programs per SM.
FORWARD_ELEMENTS, FORWARD_WARPS = 8192, 16
# For FP8; the fastest of a sweep on an H200.
CAST = {"ROWS": 32, "COLUMNS": 128, "num_warps": 8}
# For at least WIDE columns: elements of a program of the first kernel (at least a row), and of one of its warps; and
# the second's tile, the fastest of 24 on an H200 (benchmarks/NOTES.md).
WIDE, SUM_ELEMENTS, SUM_PER_WARP = 2048, 2048, 1024
WIDE_CAST: dict[str, Any] = {"ROWS": 128, "COLUMNS": 64, "VECTOR": 8, "num_warps": 4}


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _add_forward_kernel(
    x, branch, weight, bias, total, y, mean, rstd, amax, stride, branch_stride, M, eps,
    N: tl.constexpr, RMS: tl.constexpr, CENTRED_GAMMA: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write total = x + branch and y = norm(total). Without a branch total is x; without y only statistics."""
    out, row, cols, mask = normalize_rows(
        x, branch, weight, bias, total, mean, rstd, stride, branch_stride, M, eps, N, RMS, CENTRED_GAMMA, ROWS, COLUMNS
    )
    if y is not None:
        out = rounded(out, DTYPE)
        tl.store(y + row * N + cols[None, :], out, mask=mask)
        if amax is not None:
            publish(tl.where(mask, magnitude(out.to(tl.float32)), 0), None, amax, None)


@triton.jit
def _add_tile(x, branch, total, stride, branch_stride, row, cols, mask, N):
    """Store total = x + branch of a tile, and return what was stored in float32; x itself without a branch."""
    if branch is None:
        return tl.load(x + row * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    else:  # data that is not read again makes room for the rest
        v = tl.load(x + row * stride + cols[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        at = branch + row * branch_stride + cols[None, :]
        v = v.to(tl.float32) + tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        stored = rounded(v, total.dtype.element_ty)
        tl.store(total + row * N + cols[None, :], stored, mask=mask)
        return stored.to(tl.float32)


@triton.jit
def _update_statistics(v, row_mean, squares, start, count, col_mask, RMS: tl.constexpr):
    """Combine mean and sum of squared deviations of `start` columns with those of v, `count` columns.

    Chan, Golub, LeVeque 1983: tiles' means and squares combine without the cancellation of E[x^2] - E[x]^2.
    """
    if not RMS:
        part = tl.sum(v, 1) / count
        v = tl.where(col_mask, v - part[:, None], 0.0)
        step = part - row_mean
        share = count / (start + count)
        row_mean += step * share
        squares += step * step * (start * share)
    return row_mean, squares + tl.sum(v * v, 1)


@triton.jit
def _normalize(v, mask, row_mean, row_rstd, gamma, beta, RMS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the norm of a tile v by its rows' statistics, rounded to DTYPE; 0 outside the mask."""
    v = v.to(tl.float32)
    if not RMS:
        v -= row_mean[:, None]
    v = v * row_rstd[:, None] * gamma
    if beta is not None:
        v += beta
    return rounded(tl.where(mask, v, 0.0), DTYPE)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _add_forward_cast_kernel(
    x, branch, weight, bias, total, scale, data, data_t, scale_inv, mean, rstd, amax, counts,
    stride, branch_stride, total_stride, M, eps,
    N: tl.constexpr, RMS: tl.constexpr, CENTRED_GAMMA: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write total = x + branch, and norm(total), rounded to DTYPE, in FP8 to data, data_t. Without a branch total is x.

    Rows 2i and 2i + 1 are two tiles, as in quantize's kernels; M must be even for a data_t.
    """
    HALF: tl.constexpr = ROWS // 2
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    rows = tl.program_id(0) * ROWS + 2 * tl.arange(0, HALF)
    row = rows.to(tl.int64)[:, None]
    mask_a, mask_b = (rows < M)[:, None], (rows + 1 < M)[:, None]
    before = 0
    if amax is not None:
        before = read_amax(amax)
    mean_a, squares_a = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    mean_b, squares_b = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    for start in tl.range(0, N, COLUMNS, num_stages=1):
        cols = tl.max_contiguous(start + tl.arange(0, COLUMNS), [4])  # 16 bytes of float32 a thread
        col_mask = (cols < N)[None, :]
        count = tl.minimum(N - start, COLUMNS).to(tl.float32)
        a = _add_tile(x, branch, total, stride, branch_stride, row, cols, mask_a & col_mask, N)
        b = _add_tile(x, branch, total, stride, branch_stride, row + 1, cols, mask_b & col_mask, N)
        mean_a, squares_a = _update_statistics(a, mean_a, squares_a, start, count, col_mask, RMS)
        mean_b, squares_b = _update_statistics(b, mean_b, squares_b, start, count, col_mask, RMS)
    rstd_a, rstd_b = inverse_root(squares_a / N, eps), inverse_root(squares_b / N, eps)
    tl.store(rstd + rows, rstd_a, mask=rows < M)
    tl.store(rstd + rows + 1, rstd_b, mask=rows + 1 < M)
    if not RMS:
        tl.store(mean + rows, mean_a, mask=rows < M)
        tl.store(mean + rows + 1, mean_b, mask=rows + 1 < M)

    factor = tl.load(scale)
    if tl.program_id(0) == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
    tl.debug_barrier()  # a thread may read what another wrote to total
    largest = tl.zeros((HALF, COLUMNS), DTYPE)
    tallies = tl.zeros((HALF, COLUMNS), tl.int32)
    for i in tl.range(0, TILES, num_stages=1):
        tile = TILES - 1 - i  # backwards: the last written is most likely in the L2
        cols = tl.max_contiguous(tile * COLUMNS + tl.arange(0, COLUMNS), [4])
        col_mask = (cols < N)[None, :]
        gamma, beta = load_parameter(weight, cols, N, CENTRED_GAMMA), None
        if bias is not None:
            beta = load_parameter(bias, cols, N, False)
        at = total + row * total_stride + cols[None, :]
        a = tl.load(at, mask=mask_a & col_mask, other=0.0, eviction_policy="evict_first")
        a = _normalize(a, mask_a & col_mask, mean_a, rstd_a, gamma, beta, RMS, DTYPE)
        at = total + (row + 1) * total_stride + cols[None, :]
        b = tl.load(at, mask=mask_b & col_mask, other=0.0, eviction_policy="evict_first")
        b = _normalize(b, mask_b & col_mask, mean_b, rstd_b, gamma, beta, RMS, DTYPE)
        index = tl.program_id(0) * TILES  # of a tile in this band of rows
        store_pairs(a, b, factor, data, data_t, index, rows, cols, N, M, N, TARGET, ROWS, COLUMNS, "")
        if amax is not None:
            largest = larger(largest, larger(a, b))
        if counts is not None:
            tallies += tally(magnitude(a.to(tl.float32)), factor, TARGET)
            tallies += tally(magnitude(b.to(tl.float32)), factor, TARGET)
    publish(magnitude(largest.to(tl.float32)), tallies, amax, counts, before)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _normed_cast_kernel(
    total, weight, bias, scale, data, data_t, scale_inv, mean, rstd, amax, counts, stride, M,
    N: tl.constexpr, RMS: tl.constexpr, CENTRED_GAMMA: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write norm(total), rounded to DTYPE, in FP8 to data, data_t: a tile per program. M must be even for a data_t."""
    index = tl.program_id(0)
    before = 0
    if amax is not None:
        before = read_amax(amax)
    a, b, rows, cols = load_pairs(total, index, stride, M, N, ROWS, COLUMNS, VECTOR)
    factor = tl.load(scale)
    if index == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
    gamma, beta = load_parameter(weight, cols, N, CENTRED_GAMMA), None
    if bias is not None:
        beta = load_parameter(bias, cols, N, False)
    mean_a, mean_b = None, None
    if not RMS:
        mean_a = tl.load(mean + rows, mask=rows < M, other=0.0)
        mean_b = tl.load(mean + rows + 1, mask=rows + 1 < M, other=0.0)
    rstd_a = tl.load(rstd + rows, mask=rows < M, other=0.0)
    rstd_b = tl.load(rstd + rows + 1, mask=rows + 1 < M, other=0.0)
    col_mask = (cols < N)[None, :]
    a = _normalize(a, (rows < M)[:, None] & col_mask, mean_a, rstd_a, gamma, beta, RMS, DTYPE)
    b = _normalize(b, (rows + 1 < M)[:, None] & col_mask, mean_b, rstd_b, gamma, beta, RMS, DTYPE)
    store_pairs(a, b, factor, data, data_t, index, rows, cols, N, M, N, TARGET, ROWS, COLUMNS, "")
    largest, tallies = magnitude(larger(a, b).to(tl.float32)), None
    if counts is not None:
        tallies = tally(magnitude(a.to(tl.float32)), factor, TARGET)
        tallies += tally(magnitude(b.to(tl.float32)), factor, TARGET)
    publish(largest, tallies, amax, counts, before)


@functools.cache
def _rows(n: int, elements: int) -> tuple[int, int]:
    """Return ROWS, COLUMNS of a program with so many elements, or a whole row, in registers."""
    columns = triton.next_power_of_2(n)
    return max(1, elements // columns), columns


def add_forward(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    kind: str,
    out_dtype: torch.dtype,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    rowwise: bool = False,
    columnwise: bool = False,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    statistics: tuple[Tensor | None, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """Return total (None: it is x), y, data, data_t, scale_inv, mean, rstd; with a dtype, an FP8 format, y is None.

    M must be even if columnwise, and out_dtype half precision if there is a dtype. statistics: mean and rstd of x.
    """
    x = rows_contiguous(x)
    m, n = x.shape
    made, branch_stride = None, 0
    if branch is not None:
        branch = rows_contiguous(branch)
        made, branch_stride = torch.empty((m, n), dtype=x.dtype, device=x.device), branch.stride(0)
    total = x if made is None else made
    mean, rstd = float32(x, m) if kind == "layernorm" else None, float32(x, m)
    stride = x.stride(0)
    constants = constants_of(n, mean is None, zero_centered_gamma, out_dtype)
    key = (
        *traits(x, branch, weight, bias, amax),
        *(stride, branch_stride, m, n, zero_centered_gamma, kind, out_dtype),
    )
    if dtype is None:
        rows, columns = _rows(n, FORWARD_ELEMENTS)
        y = torch.empty((m, n), dtype=out_dtype, device=x.device)
        args = x, branch, weight, bias, total, y, mean, rstd, amax, stride, branch_stride, m, float(eps)
        constants |= {"ROWS": rows, "COLUMNS": columns, "num_warps": FORWARD_WARPS}
        launch(_add_forward_kernel, max(1, -(-m // rows)), key, x.get_device(), args, constants)
        return made, y, None, None, None, mean, rstd
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    scale_inv = float32(x)
    key = (*key, *traits(scale, counts), dtype, rowwise, columnwise)
    layouts = data, data_t, scale_inv
    if n < WIDE:
        casting = (
            *(x, branch, weight, bias, total, scale, *layouts, mean, rstd, amax, counts),
            *(stride, branch_stride, total.stride(0), m, float(eps)),
        )
        constants |= {"TARGET": FP8[dtype], **CAST}
        launch(_add_forward_cast_kernel, max(1, -(-m // CAST["ROWS"])), key, x.get_device(), casting, constants)
        return made, None, *layouts, mean, rstd
    rows, columns = _rows(n, SUM_ELEMENTS)
    if statistics is None or branch is not None:
        looking = x, branch, weight, bias, total, None, mean, rstd, None, stride, branch_stride, m, float(eps)
        look = {**constants, "ROWS": rows, "COLUMNS": columns, "num_warps": min(16, max(4, columns // SUM_PER_WARP))}
        launch(_add_forward_kernel, max(1, -(-m // rows)), key, x.get_device(), looking, look)
    else:
        mean, rstd = statistics
        key = (*key, *traits(mean, rstd))
    normed = total, weight, bias, scale, *layouts, mean, rstd, amax, counts, total.stride(0), m
    constants |= {"TARGET": FP8[dtype], **WIDE_CAST}
    grid = max(1, -(-m // WIDE_CAST["ROWS"])) * -(-n // WIDE_CAST["COLUMNS"])
    launch(_normed_cast_kernel, grid, key, x.get_device(), normed, constants)
    return made, None, *layouts, mean, rstd
