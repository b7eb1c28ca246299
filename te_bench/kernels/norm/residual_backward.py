# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton backward kernels of a norm in a residual stream, and their launcher.

The norm's gradient is added to the stream's, and written in the stream's precision and rounded to the branch's, for the
GEMMs that made the branch. The FP8 cast is a separate kernel: one kernel for both was slower (benchmarks/NOTES.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.launch import launch, rows_contiguous, traits
from te_bench.kernels.norm.kernels import UNALIGNED, constants_of
from te_bench.kernels.norm.residual_forward import _rows
from te_bench.kernels.quantize.kernels import float32
from te_bench.kernels.tile import magnitude, publish, rounded

# Elements of a program and of one of its warps: 2 rows of 768, 64 registers a thread. Warps per SM: as many as the
# registers hold at up to 8192 columns, without and with the sums for biases.
ELEMENTS, PER_WARP, WARPS = 2048, 256, (32, 24)
SUM_ROWS, SUM_COLUMNS = 128, 32  # tile of the second stage of the sums over rows


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _backward_kernel(
    dy, x, weight, mean, rstd, residual, branch, dx, copy, amax, partials,
    dy_stride, x_stride, residual_stride, branch_stride, M,
    N: tl.constexpr, RMS: tl.constexpr, CENTRED_GAMMA: tl.constexpr, BIASED: tl.constexpr, SUMMED: tl.constexpr,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dx, and dx rounded to DTYPE as copy, ROWS rows at a time; a program keeps its sums until its last row.

    A branch is added to x again, rounded as in the forward pass. partials, (programs, N) each: sums for dweight; for
    dbias if BIASED; of the rounded dx if SUMMED.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    # 4 columns a thread (16 bytes of float32) for every tensor: more of bf16's would have to move between threads.
    cols = tl.max_contiguous(tl.arange(0, COLUMNS), [4])
    col_mask = cols < N
    gamma = tl.load(weight + cols, mask=col_mask, other=0.0).to(tl.float32)
    if CENTRED_GAMMA:
        gamma = tl.where(col_mask, gamma + 1.0, 0.0)
    dweight = tl.zeros((COLUMNS,), tl.float32)
    dbias = tl.zeros((COLUMNS,), tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    largest = tl.zeros((COLUMNS,), tl.int32)
    for start in tl.range(program * ROWS, M, programs * ROWS):
        rows = start + tl.arange(0, ROWS)
        row = rows.to(tl.int64)[:, None]
        mask = (rows < M)[:, None] & col_mask[None, :]
        row_rstd = tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None]
        xhat = tl.load(x + row * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dy + row * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if branch is not None:
            xhat += tl.load(branch + row * branch_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            xhat = rounded(xhat, x.dtype.element_ty).to(tl.float32)
        if residual is not None:
            dstream = tl.load(residual + row * residual_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if not RMS:
            xhat -= tl.load(mean + rows, mask=rows < M, other=0.0)[:, None]
        xhat *= row_rstd  # irrelevant outside the mask, where d is 0
        dweight += tl.sum(d * xhat, 0)
        if BIASED:
            dbias += tl.sum(d, 0)
        g = d * gamma[None, :]
        out = g - xhat * (tl.sum(g * xhat, 1) / N)[:, None]
        if not RMS:
            out -= (tl.sum(g, 1) / N)[:, None]
        out *= row_rstd
        if residual is not None:
            out += dstream
        out = rounded(out, dx.dtype.element_ty)
        tl.store(dx + row * N + cols[None, :], out, mask=mask)
        copied = rounded(out.to(tl.float32), DTYPE)
        tl.store(copy + row * N + cols[None, :], copied, mask=mask)
        if SUMMED:
            total += tl.sum(tl.where(mask, copied.to(tl.float32), 0.0), 0)
        if amax is not None:
            largest = tl.maximum(largest, tl.max(tl.where(mask, magnitude(copied.to(tl.float32)), 0), 0))
    share = partials + program * N + cols
    tl.store(share, dweight, mask=col_mask)
    if BIASED:
        share += programs * N
        tl.store(share, dbias, mask=col_mask)
    if SUMMED:
        tl.store(share + programs * N, total, mask=col_mask)
    publish(largest, None, amax, None)


@triton.jit(do_not_specialize_on_alignment=["column_sum"])
def _sum_kernel(partials, sums, column_sum, shares, N, SUMMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum partials (K, shares, N) over shares, in order, into sums (K, N); if SUMMED, add the last to column_sum."""
    which = tl.program_id(1)
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, shares, ROWS, num_stages=3):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < shares)[:, None] & (cols < N)[None, :]
        total += tl.load(partials + (which * shares + rows)[:, None] * N + cols[None, :], mask=mask, other=0.0)
    result = tl.sum(total, 0)
    if SUMMED and which == tl.num_programs(1) - 1:
        before = tl.load(column_sum + cols, mask=cols < N, other=0.0)
        tl.store(column_sum + cols, before + result, mask=cols < N)
    else:
        tl.store(sums + which * N + cols, result, mask=cols < N)


def backward_rounded(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    zero_centered_gamma: bool,
    residual: Tensor | None,
    biased: bool,
    out_dtype: torch.dtype,
    amax: Tensor | None,
    column_sum: Tensor | None,
    branch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, copy and sums (1 or 2, N): dweight and dbias, float32."""
    dy, x, weight = rows_contiguous(dy), rows_contiguous(x), rows_contiguous(weight)
    residual, branch = (t if t is None else rows_contiguous(t) for t in (residual, branch))
    m, n = x.shape
    dx = torch.empty((m, n), dtype=x.dtype, device=x.device)
    copy = torch.empty((m, n), dtype=out_dtype, device=x.device)
    rows, columns = _rows(n, ELEMENTS)
    warps = min(32, max(4, rows * columns // PER_WARP))
    most = WARPS[biased or column_sum is not None or branch is not None]
    resident = max(1, most // warps) * architecture.processors(x.device)
    programs = max(1, min(-(-m // rows), resident))
    own = 1 + biased
    partials = float32(x, own + (column_sum is not None), programs, n)
    residual_stride, branch_stride = (0 if t is None else t.stride(0) for t in (residual, branch))
    strides = dy.stride(0), x.stride(0), residual_stride, branch_stride
    key = (
        *traits(dy, x, weight, mean, rstd, residual, branch, amax),
        *(*strides, m, n, zero_centered_gamma, biased, out_dtype, column_sum is None),
        *(rows, warps),
    )
    args = (dy, x, weight, mean, rstd, residual, branch, dx, copy, amax, partials, *strides, m)
    sums_of = {"BIASED": biased, "SUMMED": column_sum is not None}
    tile = {"ROWS": rows, "COLUMNS": columns, "num_warps": warps}
    constants = constants_of(n, mean is None, zero_centered_gamma, out_dtype, **sums_of, **tile)
    device = x.get_device()
    launch(_backward_kernel, programs, key, device, args, constants)
    sums = float32(x, own, n)
    more = {"SUMMED": column_sum is not None, "ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS}
    those = (partials, sums, column_sum, programs, n)
    launch(
        _sum_kernel, -(-n // SUM_COLUMNS), (programs, n, own, column_sum is None), device, those, more, len(partials)
    )
    return dx, copy, sums
