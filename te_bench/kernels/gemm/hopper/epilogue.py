"""What a warpgroup of the Gluon GEMM does with its tile: gemm.Epilogue in registers, then out through shared memory by TMA.

An epilogue's time is that of its instructions: for GELU into FP8 this one has about 17 an element, Triton's own 59, which
takes longer than the 6 blocks of K of GPT-2's products.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import math

import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from te_bench.kernels.activation.backends.reference import GELU, QGELU

LOG2_E = 1.4426950408889634
# x times the logistic function of x (a + b x^2) is x / (1 + 2^(x (LINEAR + CUBIC x^2))).
GELU_LINEAR, GELU_CUBIC = gl.constexpr(-GELU[0] * LOG2_E), gl.constexpr(-GELU[0] * GELU[1] * LOG2_E)
QGELU_LINEAR, SILU_LINEAR = gl.constexpr(-QGELU * LOG2_E), gl.constexpr(-LOG2_E)
# The slopes of the logistic function's arguments are INNER + INNER_CUBIC x^2; DENSITY is the normal distribution's at 0.
GELU_INNER, GELU_INNER_CUBIC = gl.constexpr(GELU[0]), gl.constexpr(3 * GELU[0] * GELU[1])
QGELU_INNER, NORMAL_DENSITY = gl.constexpr(QGELU), gl.constexpr(1 / math.sqrt(2 * math.pi))
# Phi(-u) = 2^(SQUARE u^2) t (a1 + a2 t + ... + a5 t^4) / 2, t = 1 / (1 + SHRINK u), to 7.5e-8: Abramowitz, Stegun, 7.1.26.
NORMAL_SQUARE, NORMAL_SHRINK = gl.constexpr(-0.5 * LOG2_E), gl.constexpr(0.3275911 * 0.5**0.5)


@builtin
def _add_to_global(desc, coordinates, source, _semantic=None):
    """desc's tensor += source at coordinates, by TMA; Gluon has the instruction and no name for it (Triton 3.7)."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coordinates, source.handle)


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
    """Phi(-u), u >= 0."""
    t = _reciprocal(1.0 + NORMAL_SHRINK * u)
    q = t * 1.061405429 - 1.453152027
    q = q * t + 1.421413741
    q = q * t - 0.284496736
    q = q * t + 0.254829592
    return _power_of_two(NORMAL_SQUARE * u * u) * (0.5 * t) * q


@gluon.jit
def _activated(x, F: gl.constexpr):
    """f(x), float32, of te_bench.kernels.activation, to some 2 ulp: exp and a full division take 15 instructions more."""
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
    """f'(x), float32, as `_activated` has f."""
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
        # Where the logistic function is flat, x * inner may have overflowed: 0 x infinity.
        return gl.where(flat == 0.0, s, s + x * flat * inner)


@gluon.jit
def _rounded(x, DTYPE: gl.constexpr):
    """x, float32, to the nearest of DTYPE, in pairs: one by one the conversion is a slow one (F2F)."""
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
    """x in float32; bfloat16 in pairs, for one by one an extraction costs as much again."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def _split_columns(x):
    """The left and the right half of x."""
    HEIGHT: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)))


@gluon.jit
def _larger(x, y):
    """The larger of the bits of two magnitudes in 16 bits, in pairs; those of NaN are larger than any."""
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def _largest(x):
    """Of each row of x, 16 bits, the largest magnitude's bits among every 8th column: nothing leaves its thread."""
    if x.dtype != gl.int16:
        magnitude = gl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x7fff7fff;", "=r,r", [x], dtype=gl.int16, is_pure=True, pack=2
        )
        return _largest(magnitude)
    elif x.shape[1] == 8:
        return x
    else:
        left, right = _split_columns(x)
        return _largest(_larger(left, right))


@gluon.jit
def _store_tile(desc, shared, row, column):
    """shared, written by all threads, to desc's tensor."""
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], shared)


@gluon.jit
def _cast(desc, shared, x, row, column):
    """x, float32, saturated and to the nearest FP8, NaN staying NaN, through shared to desc's tensor.

    Written in pairs of columns, as the instruction makes them: taken apart and put together again they cost 2 more each.
    """
    HEIGHT: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(desc.layout.swizzle_byte_width, 16, 2)
    left, right = gl.split(gl.reshape(x, (HEIGHT, WIDTH // 2, 2)))
    if desc.dtype == gl.float8e4nv:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [left, right], dtype=gl.int16, is_pure=True, pack=1
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;", "=h,f,f", [left, right], dtype=gl.int16, is_pure=True, pack=1
        )
    shared._reinterpret(gl.int16, [HEIGHT, WIDTH // 2], PAIRS).store(pairs)
    _store_tile(desc, shared, row, column)


@gluon.jit
def scale_and_add_bias(x, vectors, row, column, M, N, A_KIND: gl.constexpr):
    """x times both operands' scales, plus the bias; vectors: a_scale_inv, b_scale_inv, bias."""
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
    x, descs, staging, out_slot, residual_slot, slot, loaded, parity, vectors, scale, amax_bits, row, column, M, N,
    A_KIND: gl.constexpr, ACTIVATION: gl.constexpr, GRADIENT: gl.constexpr, DTYPE: gl.constexpr, AMAX: gl.constexpr,
    PENDING: gl.constexpr, IN_PLACE: gl.constexpr,
):  # fmt: skip
    """The epilogue of gemm.Epilogue on x, a float32 part of the product; TMA drops what lies outside of D.

    Returns amax_bits, those of the largest |out| so far, of each of the warpgroup's rows and every 8th column. PENDING:
    stores that may still be reading when the next to the same slot is due. IN_PLACE: out takes the residual's place.
    """
    HEIGHT: gl.constexpr = x.shape[0]
    d_desc, pre_desc, residual_desc, data_desc, data_t_desc = descs
    out_shared, residual_shared, pre_shared, data_shared, data_t_shared = staging
    x = scale_and_add_bias(x, vectors, row, column, M, N, A_KIND)
    if ACTIVATION is not None and not GRADIENT:
        pre = _rounded(x, DTYPE)
        if pre_desc is not None:
            tma.store_wait(PENDING)
            pre_shared.index(slot).store(pre)
            _store_tile(pre_desc, pre_shared.index(slot), row, column)
        x = _activated(_widened(pre), ACTIVATION)
    if residual_desc is not None:
        mbarrier.wait(loaded, parity)
        beside = _widened(residual_shared.index(residual_slot).load(x.type.layout))
        if GRADIENT:
            x = _widened(_rounded(x, DTYPE)) * _slope(beside, ACTIVATION)
        else:
            x += beside
    y = _rounded(x, DTYPE)
    if d_desc is not None or data_t_desc is not None:
        if d_desc is not None and not IN_PLACE:
            tma.store_wait(PENDING)
        out_shared.index(out_slot).store(y)
    if d_desc is not None:
        _store_tile(d_desc, out_shared.index(out_slot), row, column)
    if data_desc is not None:
        tma.store_wait(PENDING)
        _cast(data_desc, data_shared.index(slot), _widened(y) * gl.load(scale), row, column)
    if data_t_desc is not None:
        # Turned in 16 bits, before the cast, for the instruction that turns moves those.
        TURNED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 32])
        turned = out_shared.index(out_slot).permute((1, 0)).load(TURNED)
        tma.store_wait(PENDING)
        _cast(data_t_desc, data_t_shared.index(slot), _widened(turned) * gl.load(scale), column, row)
    if AMAX:
        rows = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, amax_bits.type.layout))
        bits = gl.convert_layout(_largest(y), amax_bits.type.layout, assert_trivial=True)
        bits = gl.where((rows < M)[:, None], bits, gl.zeros_like(bits))  # beyond M there is f(bias)
        amax_bits = _larger(amax_bits, bits)
    return amax_bits


@gluon.jit
def store_by_parts(
    x, descs, staging, who, loaded, parity, vectors, scale, amax_bits, row, column, M, N,
    A_KIND: gl.constexpr, ACTIVATION: gl.constexpr, GRADIENT: gl.constexpr, DTYPE: gl.constexpr, AMAX: gl.constexpr,
    PENDING: gl.constexpr, IN_PLACE: gl.constexpr, SLOTS: gl.constexpr, ALL: gl.constexpr, PARTS: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """_finish_part, left to right, of ALL parts, x being PARTS of them from PART on: one at a time is in registers twice."""
    WIDTH: gl.constexpr = x.shape[1]
    if PARTS == 1:
        whole, slot = who * ALL + PART, who * SLOTS + PART % SLOTS
        return _finish_part(
            x, descs, staging, whole if IN_PLACE else slot, whole, slot, loaded, parity, vectors, scale, amax_bits,
            row, column, M, N, A_KIND, ACTIVATION, GRADIENT, DTYPE, AMAX, PENDING, IN_PLACE,
        )  # fmt: skip
    else:
        HALF: gl.constexpr = PARTS // 2
        x_left, x_right = _split_columns(x)
        amax_bits = store_by_parts(
            x_left, descs, staging, who, loaded, parity, vectors, scale, amax_bits, row, column, M, N,
            A_KIND, ACTIVATION, GRADIENT, DTYPE, AMAX, PENDING, IN_PLACE, SLOTS, ALL, HALF, PART,
        )  # fmt: skip
        return store_by_parts(
            x_right, descs, staging, who, loaded, parity, vectors, scale, amax_bits, row, column + WIDTH // 2, M, N,
            A_KIND, ACTIVATION, GRADIENT, DTYPE, AMAX, PENDING, IN_PLACE, SLOTS, ALL, HALF, PART + HALF,
        )  # fmt: skip


@gluon.jit
def add_by_parts(
    x, d_desc, shared, who, vectors, row, column, M, N,
    A_KIND: gl.constexpr, SLOTS: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """D += x at (row, column), from left to right in PARTS, of which x is the PART-th; others may add at the same time."""
    WIDTH: gl.constexpr = x.shape[1]
    if PARTS == 1:
        place = shared.index(who * SLOTS + PART % SLOTS)
        x = scale_and_add_bias(x, vectors, row, column, M, N, A_KIND)
        tma.store_wait(SLOTS - 1)
        place.store(x)
        fence_async_shared()
        _add_to_global(d_desc, [row, column], place)
    else:
        HALF: gl.constexpr = PARTS // 2
        left, right = _split_columns(x)
        add_by_parts(left, d_desc, shared, who, vectors, row, column, M, N, A_KIND, SLOTS, HALF, PART)
        add_by_parts(
            right, d_desc, shared, who, vectors, row, column + WIDTH // 2, M, N, A_KIND, SLOTS, HALF, PART + HALF
        )  # fmt: skip
