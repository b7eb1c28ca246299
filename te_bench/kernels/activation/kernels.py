# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton kernels of the activations and their launchers: elementwise, in float32, memory-bound.

At an H200's 4 TB/s, an element of a quantised GELU (4 bytes) leaves time for about 30 instructions. So exponentials and
reciprocals flush subnormal numbers, and one cast serves both layouts (kernels/quantize/kernels.py).
"""

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.activation import KINDS, width
from te_bench.kernels.activation.backends.reference import GELU, QGELU
from te_bench.kernels.launch import GRID_Y, launch, rows_contiguous, traits
from te_bench.kernels.quantize.kernels import add_sums, float32, load_pairs, store_pairs
from te_bench.kernels.tile import (
    FLOATS,
    FP8,
    INTERPRETED,
    add,
    empty_pair,
    exp2,
    fits_range,
    larger,
    magnitude,
    publish,
    publish_underflows,
    read_amax,
    rounded,
    rounded_by_twos,
    tally,
)

LOG2E = 1.4426950408889634
GELU_OUTER, GELU_CUBE = (tl.constexpr(constant) for constant in GELU)
GELU_OUTER_2, QGELU_FACTOR_2, NEPER = (tl.constexpr(c * LOG2E) for c in (GELU[0], QGELU, 1.0))  # for powers of 2
QGELU_FACTOR = tl.constexpr(QGELU)

# The exact GELU: Phi(-u) = e^(-u^2 / 2) t Q(t), t = 1 / (1 + NORMAL_SHRINK u), u >= 0. The coefficients are a minimax
# fit of erfc(z) e^(z^2) / t with relative error 1.3e-7 on z >= 0 (4.7e-7 in float32). libdevice's erf selects
# coefficients by the argument's size, which would make the kernels compute-bound. The slope needs e^(-u^2 / 2), too.
NORMAL_SHRINK = tl.constexpr(0.4 * 0.5**0.5)
NORMAL_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)

NORMAL_EXPONENT = tl.constexpr(-0.5 * LOG2E)

# Rows, columns and warps of a tile: 256 bf16 columns are whole 128-byte lines; 32 elements a thread.
PLAIN = 16, 256, 4
TALLEST = GRID_Y * PLAIN[0]  # rows of a launch
# The quantisers' tiles with half the rows and warps: an SM holds five such programs of the backward pass, but two with
# 8 warps (benchmarks/NOTES.md). A gated backward pass has five tiles at once, hence 16 elements a thread.
QUANTIZED: dict[str, Any] = {"ROWS": 64, "COLUMNS": 64, "VECTOR": 8, "POLICY": "", "num_warps": 4}
GATED_BACKWARD: dict[str, Any] = {**QUANTIZED, "num_warps": 8}

# Scalars or views into tables of scalars: do not compile for each alignment.
UNALIGNED = ["scale", "amax", "counts"]


@triton.jit
def _reciprocal(x):
    """1 / x for x >= 1, to float32 rounding, 0 for subnormal results. A division takes four instructions more."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _normal_tail(magnitude, density):
    """Return Phi(-magnitude), magnitude >= 0, given density = e^(-magnitude^2 / 2); halved coefficients give Q / 2."""
    t = _reciprocal(1.0 + NORMAL_SHRINK * magnitude)
    q = t * (0.0502725914 / 2) - 0.182943597 / 2
    q = q * t + 0.169154793 / 2
    q = q * t - 0.00566764548 / 2
    q = q * t + 0.141460821 / 2
    q = q * t + 0.168533921 / 2
    q = q * t + 0.207843855 / 2
    q = q * t + 0.225669518 / 2
    q = q * t + 0.225675866 / 2
    return density * t * q


@triton.jit
def _value_and_slope(x, F: tl.constexpr):
    """Return f(x) and f'(x), float32; the compiler removes the unused one."""
    if F == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(x > 0, 1.0, 0.0)
    elif F == "srelu":
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive, 2.0 * positive
    elif F == "gelu_erf":
        density = exp2(x * x * NORMAL_EXPONENT)
        tail = _normal_tail(tl.abs(x), density)
        cdf = tl.where(x > 0, 1.0 - tail, tail)
        return x * cdf, cdf + x * density * NORMAL_DENSITY
    else:
        # The argument is in units of log 2.
        if F == "gelu":
            square = x * x
            argument = x * (GELU_OUTER_2 + GELU_OUTER_2 * GELU_CUBE * square)
            inner = GELU_OUTER + 3.0 * GELU_OUTER * GELU_CUBE * square
        elif F == "qgelu":
            argument = QGELU_FACTOR_2 * x
            inner = QGELU_FACTOR
        else:
            argument = NEPER * x
            inner = 1.0
        s = _reciprocal(1.0 + exp2(-argument))
        flat = s - s * s  # one rounding and one instruction; s (1 - s) takes two
        if F == "sigmoid":
            return s, flat
        else:
            # Where the logistic function is flat, x * inner may have overflowed; 0 x infinity would be NaN.
            return x * s, tl.where(flat == 0.0, s, s + x * flat * inner)


@triton.jit
def _forward_kernel(
    x, y, stride, M, WIDTH,
    F: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y (M, WIDTH) per program."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < M)[:, None] & (cols < WIDTH)[None, :]
    wide = rows.to(tl.int64)[:, None]
    source = x + wide * stride + cols[None, :]
    out, _ = _value_and_slope(tl.load(source, mask=mask, other=0.0).to(tl.float32), F)
    if GATED:
        out *= tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + wide * WIDTH + cols[None, :], rounded(out, DTYPE), mask=mask)


@triton.jit
def _backward_kernel(
    dy, x, dx, y, dy_stride, x_stride, M, WIDTH,
    F: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute, per program, dx for one tile of dy (M, WIDTH) (two tiles if gated), and y unless it is None."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < M)[:, None] & (cols < WIDTH)[None, :]
    wide = rows.to(tl.int64)[:, None]
    source = x + wide * x_stride + cols[None, :]
    d = tl.load(dy + wide * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    value, slope = _value_and_slope(tl.load(source, mask=mask, other=0.0).to(tl.float32), F)
    target = dx + wide * (WIDTH * 2 if GATED else WIDTH) + cols[None, :]
    if GATED:
        second = rounded(d * value, DTYPE)
        gate = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
        slope *= gate
        if y is not None:
            value *= gate
    tl.store(target, rounded(d * slope, DTYPE), mask=mask)
    if GATED:
        tl.store(target + WIDTH, second, mask=mask)
    if y is not None:
        tl.store(y + wide * WIDTH + cols[None, :], rounded(value, DTYPE), mask=mask)


@triton.jit
def _value(x, gate, F: tl.constexpr, DTYPE: tl.constexpr):
    """Return f(x), times gate unless it is None, in half precision."""
    y, _ = _value_and_slope(x.to(tl.float32), F)
    if gate is not None:
        y *= gate.to(tl.float32)
    return rounded_by_twos(y, DTYPE)


@triton.jit
def _value_and_gradients(dy, x, gate, F: tl.constexpr, DTYPE: tl.constexpr):
    """Return `_value`, x's gradient, and the gate's (x's again if gate is None), in half precision."""
    value, slope = _value_and_slope(x.to(tl.float32), F)
    d = dy.to(tl.float32)
    if gate is None:
        first = rounded_by_twos(d * slope, DTYPE)
        return rounded_by_twos(value, DTYPE), first, first
    else:
        by = gate.to(tl.float32)
        first, second = rounded_by_twos(d * (slope * by), DTYPE), rounded_by_twos(d * value, DTYPE)
        return rounded_by_twos(value * by, DTYPE), first, second


@triton.jit
def _store_pairs(
    a, b, scale, data, data_t, sums, amax, before, counts, index, rows, cols, stride, M, WIDTH,
    TARGET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Cast and store a, rows 2i of the index-th tile of WIDTH columns, and b, its rows 2i + 1; gather statistics.

    a and b are 0 beyond the edges. data has rows `stride` apart.
    """
    store_pairs(a, b, scale, data, data_t, index, rows, cols, stride, M, WIDTH, TARGET, ROWS, COLUMNS, POLICY)
    if sums is not None:
        tl.store(sums + cols, tl.sum(a.to(tl.float32) + b.to(tl.float32), 0), mask=cols < WIDTH)
    bits = magnitude(larger(a, b).to(tl.float32))
    publish(bits, None, amax, None, before)
    if counts is not None:
        publish_underflows(a, b, scale, counts, TARGET)
        if not fits_range(bits, scale, TARGET):
            tallies = tally(magnitude(a.to(tl.float32)), scale, TARGET)
            tallies += tally(magnitude(b.to(tl.float32)), scale, TARGET)
            add(counts, tl.sum(tallies & 0x3FF))
            add(counts + 2, tl.sum(tallies >> 20))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _forward_cast_kernel(
    x, scale, data, data_t, scale_inv, amax, counts, stride, M, WIDTH,
    F: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Compute one FP8 tile of y (M, WIDTH) per program, into data and data_t."""
    index = tl.program_id(0)
    factor = tl.load(scale)
    before = 0
    if amax is not None:
        before = read_amax(amax)
    a, b, rows, cols = load_pairs(x, index, stride, M, WIDTH, ROWS, COLUMNS, VECTOR)
    a_gate, b_gate = None, None
    if GATED:
        a_gate, b_gate, _, _ = load_pairs(x + WIDTH, index, stride, M, WIDTH, ROWS, COLUMNS, VECTOR)
    if index == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
    a, b = _value(a, a_gate, F, DTYPE), _value(b, b_gate, F, DTYPE)
    _store_pairs(
        a, b, factor, data, data_t, None, amax, before, counts, index, rows, cols, WIDTH, M, WIDTH,
        TARGET, ROWS, COLUMNS, POLICY,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=[*UNALIGNED, "value_scale"])
def _backward_cast_kernel(
    dy, x, scale, data, data_t, scale_inv, amax, counts, sums, value_scale, value_t, dy_stride, stride, M, WIDTH,
    F: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr, VALUE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Compute, per program, dx in FP8 for one tile of dy (M, WIDTH); sums (bands, N) gets its column sums.

    The forward pass's FP8 activation is written to value_t (WIDTH, M), unless that is None.
    """
    index = tl.program_id(0)
    factor = tl.load(scale)
    before = 0
    if amax is not None:
        before = read_amax(amax)
    a, b, rows, cols = load_pairs(x, index, stride, M, WIDTH, ROWS, COLUMNS, VECTOR)
    a_dy, b_dy, _, _ = load_pairs(dy, index, dy_stride, M, WIDTH, ROWS, COLUMNS, VECTOR)
    a_gate, b_gate = None, None
    if GATED:
        a_gate, b_gate, _, _ = load_pairs(x + WIDTH, index, stride, M, WIDTH, ROWS, COLUMNS, VECTOR)
    if index == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
    N = WIDTH * 2 if GATED else WIDTH
    if sums is not None:
        sums += (index // tl.cdiv(WIDTH, COLUMNS)).to(tl.int64) * N
    a_value, a_dx, a_dgate = _value_and_gradients(a_dy, a, a_gate, F, DTYPE)
    b_value, b_dx, b_dgate = _value_and_gradients(b_dy, b, b_gate, F, DTYPE)
    if value_t is not None:
        by = tl.load(value_scale)
        store_pairs(
            a_value, b_value, by, None, value_t, index, rows, cols, WIDTH, M, WIDTH, VALUE, ROWS, COLUMNS, POLICY
        )
    _store_pairs(
        a_dx, b_dx, factor, data, data_t, sums, amax, before, counts, index, rows, cols, N, M, WIDTH,
        TARGET, ROWS, COLUMNS, POLICY,
    )  # fmt: skip
    if GATED:  # the gates' gradient, WIDTH columns further on
        if data is not None:
            data += WIDTH
        if data_t is not None:
            data_t += tl.cast(WIDTH, tl.int64) * M  # a WIDTH of 1 is a constexpr without .to
        if sums is not None:
            sums += WIDTH
        _store_pairs(
            a_dgate, b_dgate, factor, data, data_t, sums, amax, before, counts, index, rows, cols, N, M, WIDTH,
            TARGET, ROWS, COLUMNS, POLICY,
        )  # fmt: skip


def _constants(kind: str, x: Tensor) -> dict[str, Any]:
    """Return the constants of every kernel; a launch key with kind and x's traits identifies them."""
    f, gated = KINDS[kind]
    return {"F": f, "GATED": gated, "DTYPE": FLOATS[x.dtype]}


def _by_launches(x: Tensor, *others: Tensor | None) -> Iterable[tuple[Any, ...]]:
    """Split x (M, N) and others, (M, ...) or None, by rows that one launch can have: almost always all."""
    if len(x) <= TALLEST:
        return ((x, *others),)
    tops = range(0, len(x), TALLEST)
    return [tuple([None if t is None else t[top : top + TALLEST] for t in (x, *others)]) for top in tops]


def forward(x: Tensor, kind: str) -> Tensor:
    x, f = rows_contiguous(x), width(x, kind)
    y = torch.empty((x.shape[0], f), dtype=x.dtype, device=x.device)
    rows, columns, warps = PLAIN
    stride = x.stride(0)
    constants = {**_constants(kind, x), "ROWS": rows, "COLUMNS": columns, "num_warps": warps}
    for part, to in _by_launches(x, y):
        m = part.shape[0]
        key, args = (*traits(part), stride, m, f, kind), (part, to, stride, m, f)
        launch(_forward_kernel, -(-f // columns), key, x.get_device(), args, constants, -(-m // rows))
    return y


def forward_quantized(
    x: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return data, data_t, scale_inv. x is half precision, and M even if columnwise; also in backward_quantized."""
    x, f, m = rows_contiguous(x), width(x, kind), x.shape[0]
    data, data_t = empty_pair(m, f, x, dtype, rowwise, columnwise)
    scale_inv = float32(x)
    stride = x.stride(0)
    key = (*traits(x, scale, amax, counts), stride, m, f, kind, dtype, rowwise, columnwise)
    args = (x, scale, data, data_t, scale_inv, amax, counts, stride, m, f)
    constants = {**_constants(kind, x), "TARGET": FP8[dtype], **QUANTIZED}
    grid = max(1, -(-m // QUANTIZED["ROWS"])) * -(-f // QUANTIZED["COLUMNS"])
    launch(_forward_cast_kernel, grid, key, x.get_device(), args, constants)
    return data, data_t, scale_inv


def backward(dy: Tensor, x: Tensor, kind: str, y: Tensor | None = None) -> Tensor:
    """Return dx; also writes `forward`'s result to y (M, F) unless it is None."""
    dy, x, f = rows_contiguous(dy), rows_contiguous(x), width(x, kind)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, columns, warps = PLAIN
    dy_stride, stride = dy.stride(0), x.stride(0)
    constants = {**_constants(kind, x), "ROWS": rows, "COLUMNS": columns, "num_warps": warps}
    for d, part, to, value in _by_launches(dy, x, dx, y):
        m = part.shape[0]
        key = (*traits(d, part, value), dy_stride, stride, m, f, kind)
        args = (d, part, to, value, dy_stride, stride, m, f)
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
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    column_sum: Tensor | None = None,
    value_scale: Tensor | None = None,
    value_t: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return data, data_t, scale_inv; value_t (F, M), if given, gets `forward_quantized`'s data_t by value_scale."""
    dy, x, f, m = rows_contiguous(dy), rows_contiguous(x), width(x, kind), x.shape[0]
    n = x.shape[1]
    data, data_t = empty_pair(m, n, x, dtype, rowwise, columnwise)
    scale_inv = float32(x)
    tile = GATED_BACKWARD if n > f else QUANTIZED
    bands = max(1, -(-m // tile["ROWS"]))
    # One float32 per column and band: 1 % of the kernel's traffic, and bitwise the same sum in every run.
    sums = None if column_sum is None else float32(x, bands, n)
    dy_stride, stride = dy.stride(0), x.stride(0)
    key = (
        *traits(dy, x, scale, amax, counts, value_scale),
        *(dy_stride, stride, m, f, kind, dtype, rowwise, columnwise, column_sum is None),
        value_t if value_t is None else value_t.dtype,
    )
    looks = amax, counts, sums, value_scale, value_t
    args = (dy, x, scale, data, data_t, scale_inv, *looks, dy_stride, stride, m, f)
    value = FP8[dtype if value_t is None else value_t.dtype]
    constants = {**_constants(kind, x), "TARGET": FP8[dtype], "VALUE": value, **tile}
    launch(_backward_cast_kernel, bands * -(-f // tile["COLUMNS"]), key, x.get_device(), args, constants)
    if column_sum is not None and sums is not None:
        add_sums(sums, column_sum)
    return data, data_t, scale_inv
