"""Epilogue of the Gluon GEMM: a warpgroup applies an activation in registers, then stores its tile by TMA.

Instructions bound an epilogue's time: Triton's own GELU takes longer than the 6 blocks of K of GPT-2's GEMMs.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import math

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from te_bench.kernels.activation.backends.reference import GELU, QGELU

LOG2_E = 1.4426950408889634
# x times the logistic function of x (a + b x^2) is x / (1 + 2^(x (LINEAR + CUBIC x^2))).
GELU_LINEAR, GELU_CUBIC = gl.constexpr(-GELU[0] * LOG2_E), gl.constexpr(-GELU[0] * GELU[1] * LOG2_E)
QGELU_LINEAR, SILU_LINEAR = gl.constexpr(-QGELU * LOG2_E), gl.constexpr(-LOG2_E)
# The logistic arguments' slopes are INNER + INNER_CUBIC x^2; DENSITY is the normal density at 0.
GELU_INNER, GELU_INNER_CUBIC = gl.constexpr(GELU[0]), gl.constexpr(3 * GELU[0] * GELU[1])
QGELU_INNER, NORMAL_DENSITY = gl.constexpr(QGELU), gl.constexpr(1 / math.sqrt(2 * math.pi))
# Phi(-u) = 2^(SQUARE u^2) t (a1 + a2 t + ... + a5 t^4) / 2, t = 1 / (1 + SHRINK u), to 7.5e-8: Abramowitz, Stegun, 7.1.26.
NORMAL_SQUARE, NORMAL_SHRINK = gl.constexpr(-0.5 * LOG2_E), gl.constexpr(0.3275911 * 0.5**0.5)


@gluon.jit
def _power_of_two(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _normal_tail(u):
    """Return Phi(-u), u >= 0."""
    t = _reciprocal(1.0 + NORMAL_SHRINK * u)
    q = t * 1.061405429 - 1.453152027
    q = q * t + 1.421413741
    q = q * t - 0.284496736
    q = q * t + 0.254829592
    return _power_of_two(NORMAL_SQUARE * u * u) * (0.5 * t) * q


@gluon.jit
def _activated(x, F: gl.constexpr):
    """Return f(x), float32, of kernels.activation, to about 2 ulp; exp and full division take 15 instructions more."""
    if F == "relu":
        return gl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif F == "srelu":
        positive = gl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive
    elif F == "gelu_erf":
        u = gl.abs(x)
        return gl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - u * _normal_tail(u)
    elif F == "gelu":
        return x * _reciprocal(1.0 + _power_of_two(x * (GELU_LINEAR + GELU_CUBIC * (x * x))))
    elif F == "qgelu":
        return x * _reciprocal(1.0 + _power_of_two(x * QGELU_LINEAR))
    else:
        gl.static_assert(F == "silu")
        return x * _reciprocal(1.0 + _power_of_two(x * SILU_LINEAR))


@gluon.jit
def _slope(x, F: gl.constexpr):
    """Return f'(x), float32, for `_activated`'s f."""
    if F == "relu":
        return gl.where(x > 0, 1.0, 0.0)
    elif F == "srelu":
        return 2.0 * gl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif F == "gelu_erf":
        u = gl.abs(x)
        tail = _normal_tail(u)
        return gl.where(x > 0, 1.0 - tail, tail) + x * (_power_of_two(NORMAL_SQUARE * u * u) * NORMAL_DENSITY)
    else:
        inner = 1.0
        if F == "gelu":
            square = x * x
            s = _reciprocal(1.0 + _power_of_two(x * (GELU_LINEAR + GELU_CUBIC * square)))
            inner = GELU_INNER + GELU_INNER_CUBIC * square
        elif F == "qgelu":
            s = _reciprocal(1.0 + _power_of_two(x * QGELU_LINEAR))
            inner = QGELU_INNER
        else:
            gl.static_assert(F == "silu")
            s = _reciprocal(1.0 + _power_of_two(x * SILU_LINEAR))
        flat = s - s * s
        # Where the logistic function is flat, x * inner may have overflowed; 0 x infinity would be NaN.
        return gl.where(flat == 0.0, s, s + x * flat * inner)


@gluon.jit
def _rounded(x, DTYPE: gl.constexpr):
    """Round float32 x to DTYPE, to nearest, in pairs: single conversions are slow (F2F)."""
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    elif gl.float16 == DTYPE:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    else:
        return x


@gluon.jit
def _widened(x):
    """Return x in float32; bfloat16 in pairs, because single extractions cost as much again."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def _split_columns(x):
    HEIGHT: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)))


@gluon.jit
def _store_tile(desc, shared, row, column):
    """Store shared memory, written by all threads, to desc's tensor."""
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], shared)


@gluon.jit
def _scale_and_add_bias(x, vectors, row, column, M, N, A_KIND: gl.constexpr):
    """Multiply x by both operands' scales and add the bias; vectors: a_scale_inv, b_scale_inv, bias."""
    a_scale_inv, b_scale_inv, bias = vectors
    LAYOUT: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    if A_KIND == "row":
        a_inv, b_inv = gl.load(a_scale_inv + rows, rows < M, 0.0), gl.load(b_scale_inv + columns, columns < N, 0.0)
        x = x * a_inv[:, None] * b_inv[None, :]
    elif A_KIND == "tensor":
        x = x * (gl.load(a_scale_inv) * gl.load(b_scale_inv))
    if bias is not None:
        x += gl.load(bias + columns, columns < N, 0.0).to(gl.float32)[None, :]
    return x


@gluon.jit
def _finish_part(
    x, d_desc, h_desc, d_place, h_place, loaded, parity, vectors, row, column, M, N,
    A_KIND: gl.constexpr, ACTIVATION: gl.constexpr, GRADIENT: gl.constexpr, PENDING: gl.constexpr,
):  # fmt: skip
    """Finish a float32 part x of the product and store it to D through d_place; TMA drops what lies outside of D.

    ACTIVATION: h = round(x) is stored through h_place, and D = f(h). GRADIENT: h is loaded there, and overwritten by D
    = round(x) f'(h). PENDING: stores that may still be reading when the same place is written next.
    """
    DTYPE: gl.constexpr = d_desc.dtype
    x = _scale_and_add_bias(x, vectors, row, column, M, N, A_KIND)
    if GRADIENT:
        mbarrier.wait(loaded, parity)
        h = _widened(h_place.load(x.type.layout))
        x = _widened(_rounded(x, DTYPE)) * _slope(h, ACTIVATION)
    elif ACTIVATION is not None:
        h = _rounded(x, DTYPE)
        tma.store_wait(PENDING)
        h_place.store(h)
        _store_tile(h_desc, h_place, row, column)
        x = _activated(_widened(h), ACTIVATION)
    y = _rounded(x, DTYPE)
    if not GRADIENT:
        tma.store_wait(PENDING)
    d_place.store(y)
    _store_tile(d_desc, d_place, row, column)


@gluon.jit
def store_by_parts(
    x, d_desc, h_desc, d_shared, h_shared, who, loaded, parity, vectors, row, column, M, N,
    A_KIND: gl.constexpr, ACTIVATION: gl.constexpr, GRADIENT: gl.constexpr, PENDING: gl.constexpr,
    SLOTS: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Apply _finish_part to PARTS parts of x, left to right, from D's part PART on: only one is in registers twice.

    SLOTS: parts of a warpgroup in shared memory.
    """
    WIDTH: gl.constexpr = x.shape[1]
    if PARTS == 1:
        slot = who * SLOTS + PART % SLOTS
        h_place = None if h_shared is None else h_shared.index(slot)
        _finish_part(
            x, d_desc, h_desc, d_shared.index(slot), h_place, loaded, parity, vectors, row, column, M, N,
            A_KIND, ACTIVATION, GRADIENT, PENDING,
        )  # fmt: skip
    else:
        HALF: gl.constexpr = PARTS // 2
        x_left, x_right = _split_columns(x)
        store_by_parts(
            x_left, d_desc, h_desc, d_shared, h_shared, who, loaded, parity, vectors, row, column, M, N,
            A_KIND, ACTIVATION, GRADIENT, PENDING, SLOTS, HALF, PART,
        )  # fmt: skip
        store_by_parts(
            x_right, d_desc, h_desc, d_shared, h_shared, who, loaded, parity, vectors, row, column + WIDTH // 2, M, N,
            A_KIND, ACTIVATION, GRADIENT, PENDING, SLOTS, HALF, PART + HALF,
        )  # fmt: skip
