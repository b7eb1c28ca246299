# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Operations of Triton kernels on a finished float32 tile: round, cast to FP8, gather statistics.

An `amax` or `counts` pointer that is None costs nothing: Triton compiles a None argument in.
"""

import torch
import triton
import triton.language as tl

FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

#: Triton's interpreter truncates where the GPU rounds to nearest even (bf16, FP8; Triton 3.7): there, round beforehand.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 x to dtype, to nearest."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def rounded_by_twos(x, dtype: tl.constexpr):
    """`rounded` to half precision, for tiles that are next exchanged between threads: there x.to(dtype) converts single
    elements, at an eighth of the speed (F2F for F2FP, sm_90a).
    """
    if INTERPRETED:
        return rounded(x, dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def exp2(x):
    """Return 2^x, flushing subnormals to 0; exp2 itself takes three instructions more for them (Triton 3.7)."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def to_fp8(x, dtype: tl.constexpr):
    """Cast float32 x to dtype, saturated, to nearest; NaN stays NaN."""
    if INTERPRETED:
        LIMIT: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
        x = tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        MANTISSA: tl.constexpr = 3 if dtype == tl.float8e4nv else 2
        SMALLEST: tl.constexpr = 121 if dtype == tl.float8e4nv else 113  # biased exponents of 2^-6 and 2^-14, normal
        bits = x.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 0xFF, SMALLEST)
        step = ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True)  # between neighbours of dtype
        ties_to_even = step * 12582912.0  # 1.5 x 2^23: the sum's last bit is worth one step
        nearest = (x + ties_to_even) - ties_to_even
        signed = (nearest.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
        code = signed.to(dtype).to(tl.uint8, bitcast=True)
        return tl.where(x == x, code, 0x7F).to(tl.uint8).to(dtype, bitcast=True)
    else:
        # Infinity becomes the largest, too (PTX ISA, cvt). Four bytes leave as one register: if two bytes are both
        # combined with others and used alone (x.to(dtype)), ptxas 12.8 fuses the former and reads the stack pointer for
        # the latter (sm_90a).
        CAST: tl.constexpr = "cvt.rn.satfinite." + ("e4m3x2" if dtype == tl.float8e4nv else "e5m2x2") + ".f32 "
        code = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; " + CAST + "low, $2, $1; " + CAST + "high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
        return code.to(dtype, bitcast=True)


@triton.jit
def zip_bytes(a, b):
    """Combine bytes a (low) and b (high) to 16 bits."""
    if INTERPRETED:
        return a.to(tl.uint16) | (b.to(tl.uint16) << 8)
    else:  # the compiler makes four times as many instructions of the above
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;", "=r,=r,r,r", [a, b],
            dtype=tl.uint16, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def larger(a, b):
    """Return max(|a|, |b|), with any sign, for tiles of one dtype; NaN above infinity. Half precision goes by pairs."""
    if not INTERPRETED and (a.dtype == tl.bfloat16 or a.dtype == tl.float16):
        ASM: tl.constexpr = "max.NaN.xorsign.abs." + ("bf16x2" if a.dtype == tl.bfloat16 else "f16x2") + " $0, $1, $2;"
        return tl.inline_asm_elementwise(ASM, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)
    else:
        bits = tl.maximum(magnitude(a.to(tl.float32)), magnitude(b.to(tl.float32)))
        return bits.to(tl.float32, bitcast=True).to(a.dtype)


@triton.jit
def magnitude(y):
    """Return the bits of |y|, float32 as int32: they sort as |y|, infinity above every number, NaN above that."""
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def tally(bits, scale, dtype: tl.constexpr):
    """Return which elements saturated, underflowed, are not finite, as 1, 1 << 10 and 1 << 20: 1023 tiles can be added.

    bits: magnitude(y). An element underflows at or below half of dtype's smallest, 2^-9 or 2^-16: the tie goes to zero.
    """
    LIMIT: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
    TINY: tl.constexpr = 2.0**-10 if dtype == tl.float8e4nv else 2.0**-17
    scaled = bits.to(tl.float32, bitcast=True) * scale
    finite = bits < 0x7F800000
    saturated = (finite & (scaled > LIMIT)).to(tl.int32)
    underflowed = ((bits > 0) & (scaled <= TINY)).to(tl.int32)
    return saturated + (underflowed << 10) + ((1 - finite.to(tl.int32)) << 20)


@triton.jit
def read_amax(amax):
    """Load amax's current bits, for `publish`: loaded early, they arrive in time."""
    return tl.load(amax.to(tl.pointer_type(tl.int32), bitcast=True), cache_modifier=".cg")


@triton.jit
def publish(bits, tallies, amax, counts, before=0):
    """Raise amax to the maximum of bits, and add the sum of tallies to counts, for at most 2^21 elements of a program.

    before: an earlier value of amax. amax only grows, so values not above `before` need no atomic.
    """
    if amax is not None:
        largest = tl.max(bits)
        at = amax.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_max(at, largest, mask=largest > before, sem="relaxed")
    if counts is not None:
        add(counts + 1, tl.sum((tallies >> 10) & 0x3FF))
        if tl.max(tallies & 0x3FF003FF) > 0:  # rare
            add(counts, tl.sum(tallies & 0x3FF))
            add(counts + 2, tl.sum(tallies >> 20))


@triton.jit
def add(counter, count):
    """Add count, int32, to counter, int64."""
    tl.atomic_add(counter, count.to(tl.int64), mask=count > 0, sem="relaxed")


@triton.jit
def underflows(v, scale, dtype: tl.constexpr):
    """Return which nonzero elements of v become 0: at or below half of dtype's smallest, the tie included."""
    TINY: tl.constexpr = 2.0**-10 if dtype == tl.float8e4nv else 2.0**-17
    y = v.to(tl.float32)
    return ((y != 0) & (tl.abs(y * scale) <= TINY)).to(tl.int32)


@triton.jit
def publish_underflows(a, b, scale, counts, dtype: tl.constexpr):
    """Add the elements of a program's tiles a and b that become 0 to counts."""
    add(counts + 1, tl.sum(underflows(a, scale, dtype) + underflows(b, scale, dtype)))


@triton.jit
def fits_range(bits, scale, dtype: tl.constexpr):
    """Return whether values with magnitudes up to those in bits, times scale, are finite and do not saturate."""
    LIMIT: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
    return tl.max(bits).to(tl.float32, bitcast=True) * scale <= LIMIT


def lacks_triton(device: str) -> str | None:
    """Return why Triton's kernels cannot run on a device of this type, or None."""
    if device == "cuda" or triton.knobs.runtime.interpret:
        return None
    return "needs an NVIDIA GPU (or TRITON_INTERPRET=1)"


def empty_pair(
    m: int, n: int, x: torch.Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Allocate the requested layouts, (M, N) and (N, M)."""
    # Sizes one by one: a tuple of them costs the host 0.3 us more to parse (torch 2.11).
    data = x.new_empty(m, n, dtype=dtype) if rowwise else None
    data_t = x.new_empty(n, m, dtype=dtype) if columnwise else None
    return data, data_t
