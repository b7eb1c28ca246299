# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The norms' Triton kernels and their launchers.

Statistics are in float32 and around the mean. residual_forward.py adds a branch or casts to FP8 in the same pass.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.launch import launch, rows_contiguous, traits
from te_bench.kernels.tile import FLOATS, rounded

# Scalars or views into tables of scalars: do not compile for each alignment.
UNALIGNED = ["scale", "amax", "counts"]


@triton.jit
def inverse_root(variance, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(variance + eps))


@triton.jit
def load_parameter(at, cols, N, CENTRED: tl.constexpr):
    """Load columns of a weight or a bias, float32, (1, columns), plus 1 if CENTRED."""
    parameter = tl.load(at + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    return parameter + 1.0 if CENTRED else parameter


@triton.jit
def normalize_rows(
    x, branch, weight, bias, total, mean, rstd, stride, branch_stride, M, eps,
    N: tl.constexpr, RMS: tl.constexpr, CENTRED_GAMMA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute total = x + branch (x without a branch), its mean and rstd, for ROWS whole rows in registers.

    Returns norm(total) in float32, the offsets of its rows, its columns and its mask.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLUMNS)
    col_mask = (cols < N)[None, :]
    row = rows.to(tl.int64)[:, None]
    mask = (rows < M)[:, None] & col_mask
    centred = tl.load(x + row * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if branch is not None:
        centred += tl.load(branch + row * branch_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        stored = rounded(centred, total.dtype.element_ty)
        tl.store(total + row * N + cols[None, :], stored, mask=mask)
        centred = stored.to(tl.float32)
    if not RMS:
        row_mean = tl.div_rn(tl.sum(centred, 1), float(N))  # a plain / may err by two roundings
        tl.store(mean + rows, row_mean, mask=rows < M)
        centred = tl.where(col_mask, centred - row_mean[:, None], 0.0)
    row_rstd = inverse_root(tl.sum(centred * centred, 1) / N, eps)
    tl.store(rstd + rows, row_rstd, mask=rows < M)
    y = centred * row_rstd[:, None] * load_parameter(weight, cols, N, CENTRED_GAMMA)
    if bias is not None:
        y += load_parameter(bias, cols, N, False)
    return y, row, cols, mask


@triton.jit
def _forward_kernel(
    x, weight, bias, y, mean, rstd, stride, M, eps,
    N: tl.constexpr, RMS: tl.constexpr, CENTRED_GAMMA: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    out, row, cols, mask = normalize_rows(
        x, None, weight, bias, None, mean, rstd, stride, 0, M, eps, N, RMS, CENTRED_GAMMA, ROWS, COLUMNS
    )
    tl.store(y + row * N + cols[None, :], rounded(out, DTYPE), mask=mask)


@triton.jit
def _backward_kernel(
    dy,
    x,
    weight,
    mean,
    rstd,
    residual,
    dx,
    partials,
    dy_stride,
    x_stride,
    residual_stride,
    M,
    N: tl.constexpr,
    RMS: tl.constexpr,
    CENTRED_GAMMA: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Process ROWS whole rows at a time; a program's dweight and dbias stay in registers until its last row."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, COLUMNS)
    gamma = tl.load(weight + cols, mask=cols < N, other=0.0).to(tl.float32)
    if CENTRED_GAMMA:
        gamma = tl.where(cols < N, gamma + 1.0, 0.0)
    dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(program * ROWS, M, programs * ROWS, num_stages=2):
        rows = start + tl.arange(0, ROWS)
        row = rows.to(tl.int64)[:, None]
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        row_rstd = tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None]
        xhat = tl.load(x + row * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dy + row * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if not RMS:
            xhat -= tl.load(mean + rows, mask=rows < M, other=0.0)[:, None]
        xhat *= row_rstd  # irrelevant outside the mask, where d is 0
        g = d * gamma[None, :]
        out = g - xhat * (tl.sum(g * xhat, 1) / N)[:, None]
        if not RMS:
            out -= (tl.sum(g, 1) / N)[:, None]
            dbias += d
        out *= row_rstd
        if residual is not None:
            out += tl.load(residual + row * residual_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + row * N + cols[None, :], rounded(out, DTYPE), mask=mask)
        dweight += d * xhat
    tl.store(partials + program * N + cols, tl.sum(dweight, 0), mask=cols < N)
    if not RMS:
        tl.store(partials + (programs + program) * N + cols, tl.sum(dbias, 0), mask=cols < N)


@functools.cache
def _whole_rows(n: int, per_warp: int) -> tuple[int, int, int]:
    """Return ROWS, COLUMNS, warps of a kernel with whole rows in registers: at least 4096 elements a program."""
    columns = triton.next_power_of_2(n)
    rows = min(16, max(1, 4096 // columns))
    return rows, columns, max(4, rows * columns // per_warp)


def constants_of(n: int, rms: bool, zero_centered_gamma: bool, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    """Return the constants of every norm kernel; dtype is the rounded output's."""
    return {"N": n, "RMS": rms, "CENTRED_GAMMA": zero_centered_gamma, "DTYPE": FLOATS[dtype], **more}


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool, kind: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    x, weight = rows_contiguous(x), rows_contiguous(weight)
    bias = bias if bias is None else rows_contiguous(bias)
    m, n = x.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    mean = torch.empty(m, dtype=torch.float32, device=x.device) if kind == "layernorm" else None
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    rows, columns, warps = _whole_rows(n, per_warp=1024)  # 32 elements a thread: 4 rows of 768 or 1 of 4096 for 4 warps
    stride = x.stride(0)
    key = (*traits(x, weight, bias), stride, m, n, zero_centered_gamma, kind)
    args = (x, weight, bias, y, mean, rstd, stride, m, float(eps))
    constants = constants_of(n, mean is None, zero_centered_gamma, x.dtype, ROWS=rows, COLUMNS=columns, num_warps=warps)
    launch(_forward_kernel, -(-m // rows), key, x.get_device(), args, constants)
    return y, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    zero_centered_gamma: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    dy, x, weight = rows_contiguous(dy), rows_contiguous(x), rows_contiguous(weight)
    residual = residual if residual is None else rows_contiguous(residual)
    m, n = x.shape
    dx = torch.empty((m, n), dtype=x.dtype, device=x.device)
    rows, columns, warps = _whole_rows(n, per_warp=512)  # half the forward's: the two sums are in registers as well
    # 8 warps at about 110 registers a thread: two programs fill an SM's registers; with 16 warps one does.
    programs = min(max(1, -(-m // rows)), architecture.processors(x.device) * (2 if warps <= 8 else 1))
    partials = torch.empty((1 if mean is None else 2, programs, n), dtype=torch.float32, device=x.device)
    dy_stride, stride, residual_stride = dy.stride(0), x.stride(0), 0 if residual is None else residual.stride(0)
    key = (
        *traits(dy, x, weight, mean, rstd, residual),
        *(dy_stride, stride, residual_stride, m, n, zero_centered_gamma),
    )
    args = (dy, x, weight, mean, rstd, residual, dx, partials, dy_stride, stride, residual_stride, m)
    constants = constants_of(n, mean is None, zero_centered_gamma, x.dtype, ROWS=rows, COLUMNS=columns, num_warps=warps)
    launch(_backward_kernel, programs, key, x.get_device(), args, constants)
    sums = partials.sum(1).to(weight.dtype)
    return dx, sums[0], None if mean is None else sums[1]
