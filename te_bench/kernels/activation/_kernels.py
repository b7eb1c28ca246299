# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The activations' Triton kernels and their launchers: elementwise, in float32, bound by memory."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels._epilogue import FLOATS, FP8, empty_pair, publish, quantize_tile, rounded
from te_bench.kernels._launch import launch, rows_contiguous, traits
from te_bench.kernels.activation import KINDS, width
from te_bench.kernels.activation.reference import GELU, QGELU

GELU_OUTER, GELU_CUBE = (tl.constexpr(constant) for constant in GELU)
QGELU_FACTOR = tl.constexpr(QGELU)

# Rows, columns and warps of a tile. Plain: 256 columns of bf16 are whole 128-byte lines, 32 elements a thread. Quantising:
# 64 rows fill two sectors of a row of the transposed layout, 128 columns a line of the other.
PLAIN = 16, 256, 4
QUANTIZED = 64, 128, 8
GATED_BACKWARD = 64, 64, 8  # five tiles at once: with 32 elements a thread one program would fill an SM's registers

# A tensor of one number, or a view into a table of them: not worth a compilation for each alignment.
UNALIGNED = ["scale", "amax", "counts"]


@triton.jit
def _value_and_slope(x, F: tl.constexpr):
    """f(x) and f'(x), float32; which of them is not used is compiled away."""
    if F == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(x > 0, 1.0, 0.0)
    elif F == "srelu":
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive, 2.0 * positive
    else:
        if F == "gelu":
            square = x * x
            argument = GELU_OUTER * (x + GELU_CUBE * square * x)
            inner = GELU_OUTER * (1.0 + 3.0 * GELU_CUBE * square)
        elif F == "qgelu":
            argument = QGELU_FACTOR * x
            inner = QGELU_FACTOR
        else:
            argument = x
            inner = 1.0
        s = tl.sigmoid(argument)
        flat = s * (1.0 - s)
        if F == "sigmoid":
            return s, flat
        else:
            # Where the logistic function is flat, x * inner may have overflowed: 0 x infinity.
            return x * s, tl.where(flat == 0.0, s, s + x * flat * inner)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _forward_kernel(
    x,
    scale,
    y,
    data,
    data_t,
    scale_inv,
    amax,
    counts,
    stride,
    M,
    WIDTH,
    F: tl.constexpr,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    TARGET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile of y (M, WIDTH) a program: into y, or, where that is None, in FP8 into data and data_t."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < M)[:, None] & (cols < WIDTH)[None, :]
    wide = rows.to(tl.int64)[:, None]
    source = x + wide * stride + cols[None, :]
    out, _ = _value_and_slope(tl.load(source, mask=mask, other=0.0).to(tl.float32), F)
    if GATED:
        out *= tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    out = rounded(out, DTYPE)
    if y is not None:
        tl.store(y + wide * WIDTH + cols[None, :], out, mask=mask)
    else:
        factor = tl.load(scale)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(scale_inv, tl.div_rn(1.0, factor))
        bits, tallies = quantize_tile(out, mask, factor, data, data_t, rows, cols, M, WIDTH, TARGET)
        publish(bits, tallies, amax, counts)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _backward_kernel(
    dy,
    x,
    scale,
    dx,
    data,
    data_t,
    scale_inv,
    amax,
    counts,
    partials,
    dy_stride,
    x_stride,
    M,
    WIDTH,
    F: tl.constexpr,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    TARGET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile of dy (M, WIDTH) a program and its tile, or two, of dx: plain, or in FP8 with each column's sum."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live = cols < WIDTH
    mask = (rows < M)[:, None] & live[None, :]
    wide = rows.to(tl.int64)[:, None]
    source = x + wide * x_stride + cols[None, :]
    d = tl.load(dy + wide * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    value, slope = _value_and_slope(tl.load(source, mask=mask, other=0.0).to(tl.float32), F)
    N = WIDTH * 2 if GATED else WIDTH
    if GATED:
        second = rounded(d * value, DTYPE)
        slope *= tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    first = rounded(d * slope, DTYPE)
    if dx is not None:
        target = dx + wide * N + cols[None, :]
        tl.store(target, first, mask=mask)
        if GATED:
            tl.store(target + WIDTH, second, mask=mask)
    else:
        factor = tl.load(scale)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(scale_inv, tl.div_rn(1.0, factor))
        bits, tallies = quantize_tile(first, mask, factor, data, data_t, rows, cols, M, N, TARGET)
        if partials is not None:
            sums = partials + tl.program_id(1) * N + cols
            tl.store(sums, tl.sum(first.to(tl.float32), 0), mask=live)
        if GATED:
            more, others = quantize_tile(second, mask, factor, data, data_t, rows, cols + WIDTH, M, N, TARGET)
            bits = tl.maximum(bits, more)
            tallies += others
            if partials is not None:
                tl.store(sums + WIDTH, tl.sum(second.to(tl.float32), 0), mask=live)
        publish(bits, tallies, amax, counts)


def _constants(kind: str, x: Tensor, target: Any, tile: tuple[int, int, int]) -> dict[str, Any]:
    """What the kernels are compiled with; target is FP8's, None of a plain one. A key with kind, x and target tells."""
    f, gated = KINDS[kind]
    rows, columns, warps = tile
    return {
        "F": f, "GATED": gated, "DTYPE": FLOATS[x.dtype], "TARGET": target,
        "ROWS": rows, "COLUMNS": columns, "num_warps": warps,
    }  # fmt: skip


def forward(x: Tensor, kind: str) -> Tensor:
    x, f, m = rows_contiguous(x), width(x, kind), x.shape[0]
    y = torch.empty((m, f), dtype=x.dtype, device=x.device)
    rows, columns, _ = PLAIN
    stride = x.stride(0)
    key = (*traits(x), stride, m, f, kind)
    args = (x, None, y, None, None, None, None, None, stride, m, f)
    constants = _constants(kind, x, None, PLAIN)
    launch(_forward_kernel, -(-f // columns), key, x.get_device(), args, constants, -(-m // rows))
    return y


def forward_quantized(
    x: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    x, f, m = rows_contiguous(x), width(x, kind), x.shape[0]
    data, data_t = empty_pair(m, f, x, dtype, rowwise, columnwise)
    scale_inv = torch.empty((), dtype=torch.float32, device=x.device)
    rows, columns, _ = QUANTIZED
    stride = x.stride(0)
    key = (*traits(x, scale, amax, counts), stride, m, f, kind, dtype, rowwise, columnwise)
    args = (x, scale, None, data, data_t, scale_inv, amax, counts, stride, m, f)
    constants = _constants(kind, x, FP8[dtype], QUANTIZED)
    launch(_forward_kernel, -(-f // columns), key, x.get_device(), args, constants, max(1, -(-m // rows)))
    return data, data_t, scale_inv


def backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    dy, x, f, m = rows_contiguous(dy), rows_contiguous(x), width(x, kind), x.shape[0]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, columns, _ = PLAIN
    dy_stride, stride = dy.stride(0), x.stride(0)
    key = (*traits(dy, x), dy_stride, stride, m, f, kind)
    args = (dy, x, None, dx, None, None, None, None, None, None, dy_stride, stride, m, f)
    constants = _constants(kind, x, None, PLAIN)
    launch(_backward_kernel, -(-f // columns), key, x.get_device(), args, constants, -(-m // rows))
    return dx


def backward_quantized(
    dy: Tensor,
    x: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
    column_sum: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    dy, x, f, m = rows_contiguous(dy), rows_contiguous(x), width(x, kind), x.shape[0]
    n = x.shape[1]
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    scale_inv = torch.empty((), dtype=torch.float32, device=x.device)
    tile = GATED_BACKWARD if n > f else QUANTIZED
    rows, columns, _ = tile
    bands = max(1, -(-m // rows))
    # A float32 a column for every 64 rows: 1 % of the kernel's traffic, and a sum that is the same in every run.
    partials = None if column_sum is None else torch.empty((bands, n), dtype=torch.float32, device=x.device)
    dy_stride, stride = dy.stride(0), x.stride(0)
    key = (
        *traits(dy, x, scale, amax, counts),
        *(dy_stride, stride, m, f, kind, dtype, rowwise, columnwise, column_sum is None),
    )
    args = (dy, x, scale, None, data, data_t, scale_inv, amax, counts, partials, dy_stride, stride, m, f)
    constants = _constants(kind, x, FP8[dtype], tile)
    launch(_backward_kernel, -(-f // columns), key, x.get_device(), args, constants, bands)
    if column_sum is not None and partials is not None:
        column_sum.add_(partials.sum(0))
    return data, data_t, scale_inv
