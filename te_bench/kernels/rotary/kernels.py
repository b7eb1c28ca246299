# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The rotary Triton kernel and its launcher: elementwise, in float32, memory-bound.

At an H200's 4 TB/s an element of bf16, read and written, leaves time for about 30 instructions. All heads of a position
share its angles: a thread computes its features' cosines and sines once, and then loops over the heads.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from te_bench.kernels.launch import launch, rows_contiguous, traits
from te_bench.kernels.rotary import PARTS, Rotated
from te_bench.kernels.tile import FLOATS, INTERPRETED, rounded

QUARTERS = tl.constexpr(0.6366197723675814)  # 2 / pi
#: pi / 2 as three float32 parts: the remainder of angles up to 10^6 is accurate to 2^-22.
HIGH, MIDDLE, LOW = map(tl.constexpr, (1.5707960128784180, 3.1391647326017846e-07, 5.390302529957765e-15))
#: Coefficients of sine and cosine on [-pi/4, pi/4] (Cephes 2.8, sinf.c): r + r^3 p(r^2), 1 - r^2 / 2 + r^4 p(r^2).
S3, S5, S7 = map(tl.constexpr, (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4))
C4, C6, C8 = map(tl.constexpr, (4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5))

#: A program's heads at once, how often, and positions times feature pairs: 8 pairs a thread, 16 bytes of bf16; 16 heads
#: share the cosines and sines. The fastest of twelve on an H200.
HEADS, EACH, AREA, WARPS = 2, 8, 512, 2


@triton.jit
def _cosine_and_sine(a):
    """Return cos(a) and sin(a) for |a| up to 10^6, to float32's remainder, with a third of tl.cos's instructions.

    cos.approx and sin.approx err by up to 2^-20, twice the tolerance of a layer's float32 gradients.
    """
    quarters = tl.floor(a * QUARTERS + 0.5)
    if INTERPRETED:  # the interpreter's fma rounds twice
        r = (a.to(tl.float64) - quarters.to(tl.float64) * (HIGH + MIDDLE + LOW)).to(tl.float32)
    else:
        r = tl.fma(-quarters, LOW, tl.fma(-quarters, MIDDLE, tl.fma(-quarters, HIGH, a)))
    s = r * r
    sine = tl.fma(r * s, tl.fma(s, tl.fma(s, S7, S5), S3), r)
    cosine = tl.fma(s * s, tl.fma(s, tl.fma(s, C8, C6), C4), tl.fma(s, -0.5, 1.0))
    quarter = quarters.to(tl.int32)
    odd = (quarter & 1) != 0
    sine, cosine = tl.where(odd, cosine, sine), tl.where(odd, sine, cosine)
    return tl.where(((quarter + 1) & 2) != 0, -cosine, cosine), tl.where((quarter & 2) != 0, -sine, sine)


@triton.jit
def _pick(part, first, second, third):
    return tl.where(part == 0, first, tl.where(part == 1, second, third))


@triton.jit
def _load_pairs(
    at, inside, POSITIONS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Load the first and the second number of each pair of features."""
    if INTERLEAVED:
        return tl.split(tl.reshape(tl.load(at, mask=inside, other=0.0), [1, POSITIONS, WIDTH, 2]))
    else:
        return tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)


@triton.jit
def rotary_kernel(
    x0, x1, x2, out0, out1, out2, angles0, angles1, angles2,
    x0_position, x1_position, x2_position, x0_batch, x1_batch, x2_batch,
    x0_group, x1_group, x2_group, x0_head, x1_head, x2_head,
    out0_position, out1_position, out2_position, out0_batch, out1_batch, out2_batch,
    out0_group, out1_group, out2_group, out0_head, out1_head, out2_head,
    angles0_position, angles1_position, angles2_position,
    heads0, heads1, heads2, group0, group1, group2, chunks0, chunks1, positions,
    D: tl.constexpr, TURNED: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, COPIED: tl.constexpr,
    INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr,
    POSITIONS: tl.constexpr, HEADS: tl.constexpr, EACH: tl.constexpr, FAR: tl.constexpr, TABLES: tl.constexpr,
):  # fmt: skip
    """Rotate a block of positions of HEADS x EACH heads per program: blocks of a batch, batches; then all parts' heads.

    `group`: a part's heads per group; parts from COPIED on are copied unrotated. D features, of which TURNED rotate:
    WIDTH pairs, and REST others to be copied, rounded up to powers of two. FAR: heads are 2^31 apart or more. TABLES:
    angles hold TURNED cosines and then TURNED sines.
    """
    chunk, blocks = tl.program_id(1), tl.cdiv(positions, POSITIONS)
    part = (chunk >= chunks0).to(tl.int32) + (chunk >= chunks0 + chunks1).to(tl.int32)
    chunk -= _pick(part, 0, chunks0, chunks0 + chunks1)
    n, group = _pick(part, heads0, heads1, heads2), _pick(part, group0, group1, group2)
    x_group, x_head = _pick(part, x0_group, x1_group, x2_group), _pick(part, x0_head, x1_head, x2_head)
    out_group = _pick(part, out0_group, out1_group, out2_group)
    out_head = _pick(part, out0_head, out1_head, out2_head)

    batch = (tl.program_id(0) // blocks).to(tl.int64)
    rows = tl.program_id(0) % blocks * POSITIONS + tl.arange(0, POSITIONS)
    live, row = (rows < positions)[None, :, None], rows.to(tl.int64)[None, :, None]
    x = _pick(part, x0, x1, x2) + batch * _pick(part, x0_batch, x1_batch, x2_batch)
    x += row * _pick(part, x0_position, x1_position, x2_position)
    out = _pick(part, out0, out1, out2) + batch * _pick(part, out0_batch, out1_batch, out2_batch)
    out += row * _pick(part, out0_position, out1_position, out2_position)

    # Interleaved pairs are one tile, split within threads; halves are two.
    HALF: tl.constexpr = TURNED // 2
    cols = tl.arange(0, 2 * WIDTH if INTERLEAVED else WIDTH)[None, None, :]
    inside = live & (cols < (TURNED if INTERLEAVED else HALF))
    angle = _pick(part, angles0, angles1, angles2) + cols
    angle += row * _pick(part, angles0_position, angles1_position, angles2_position)
    if TABLES:
        cos_a, cos_b = _load_pairs(angle, inside, POSITIONS, WIDTH, HALF, INTERLEAVED)
        sin_a, sin_b = _load_pairs(angle + TURNED, inside, POSITIONS, WIDTH, HALF, INTERLEAVED)
    else:
        a, b = _load_pairs(angle, inside, POSITIONS, WIDTH, HALF, INTERLEAVED)
        cos_a, sin_a = _cosine_and_sine(a)
        cos_b, sin_b = _cosine_and_sine(b)
    if TRANSPOSED:
        sin_a, sin_b = -sin_b, -sin_a

    for i in range(EACH):
        heads = (chunk * EACH + i) * HEADS + tl.arange(0, HEADS)[:, None, None]
        there = heads < n
        if FAR:
            heads = heads.to(tl.int64)
        source = x + heads // group * x_group + heads % group * x_head
        target = out + heads // group * out_group + heads % group * out_head
        mask = there & inside
        if INTERLEAVED:
            whole = tl.reshape(tl.load(source + cols, mask=mask, other=0.0), [HEADS, POSITIONS, WIDTH, 2])
            first, second = tl.split(whole)
        else:
            first = tl.load(source + cols, mask=mask, other=0.0)
            second = tl.load(source + HALF + cols, mask=mask, other=0.0)
        first, second = first.to(tl.float32), second.to(tl.float32)
        low, high = first * cos_a - second * sin_a, second * cos_b + first * sin_b
        if COPIED < 3:
            low, high = tl.where(part >= COPIED, first, low), tl.where(part >= COPIED, second, high)
        if INTERLEAVED:
            whole = tl.reshape(tl.join(low, high), [HEADS, POSITIONS, 2 * WIDTH])
            tl.store(target + cols, rounded(whole, DTYPE), mask=mask)
        else:
            tl.store(target + cols, rounded(low, DTYPE), mask=mask)
            tl.store(target + HALF + cols, rounded(high, DTYPE), mask=mask)
        if REST > 0:
            beyond = TURNED + tl.arange(0, REST)[None, None, :]
            passing = there & live & (beyond < D)
            tl.store(target + beyond, tl.load(source + beyond, mask=passing), mask=passing)


def rotate(parts: Sequence[Rotated], interleaved: bool, transposed: bool, tables: bool = False) -> None:
    """Rotate by the kernel: one launch per width of angles; parts without angles join the first."""
    parts = [part for part in parts if part.x.numel()]
    widths = dict.fromkeys([part.angles.shape[1] for part in parts if part.angles is not None])
    copied = [part for part in parts if part.angles is None and _is_moved(part)]
    for width in widths:
        turned = [part for part in parts if part.angles is not None and part.angles.shape[1] == width]
        _launch(turned, copied, width // 2 if tables else width, interleaved, transposed, tables)
        copied = []
    for x, out, _ in copied:
        out.copy_(x)


def _launch(
    turned: list[Rotated], copied: list[Rotated], width: int, interleaved: bool, transposed: bool, tables: bool
) -> None:
    used = [*turned, *copied]
    sizes = [part.x.shape for part in used]
    positions, batch, _, _, d = sizes[0]
    heads = [groups * group for _, _, groups, group, _ in sizes]
    beyond = d - width if any(map(_is_moved, used)) else 0
    constants = _constants(d, width, beyond, max(heads), used[0].x.dtype)
    each = constants["HEADS"] * constants["EACH"]
    chunks = [-(-n // each) for n in heads]
    copies = len(turned) if copied else PARTS
    absent = PARTS - len(used)  # the grid reaches none of them
    filled = used + used[:1] * absent
    tensors = [
        *[part.x for part in filled], *[part.out for part in filled],
        *[rows_contiguous(turned[0].angles if part.angles is None else part.angles) for part in filled],
    ]  # fmt: skip
    strides = [t.stride() for t in tensors]
    integers = (
        *[stride[axis] for start in (0, PARTS) for axis in range(4) for stride in strides[start : start + PARTS]],
        *[stride[0] for stride in strides[2 * PARTS :]], *heads, *heads[:1] * absent,
        *[size[3] for size in sizes], *[sizes[0][3]] * absent, chunks[0], chunks[1] if len(chunks) > 1 else 0, positions,
    )  # fmt: skip
    grid = -(-positions // constants["POSITIONS"]) * batch
    key = (*traits(*tensors), *integers, *constants.values(), copies, interleaved, transposed, tables)
    far = max(integers[6:12] + integers[18:24]) * max(heads) >= 2**31  # 64-bit strides would cost 15 registers a thread
    settings = {"COPIED": copies, "INTERLEAVED": interleaved, "TRANSPOSED": transposed, "FAR": far, "TABLES": tables}
    constants = {**constants, **settings}
    launch(rotary_kernel, grid, key, tensors[0].get_device(), (*tensors, *integers), constants, grid_y=sum(chunks))


@functools.cache
def _constants(d: int, width: int, beyond: int, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the kernel's constants for D and TURNED, with `beyond` features to copy, and `heads` at most."""
    pairs, rest = triton.next_power_of_2(max(1, width // 2)), triton.next_power_of_2(beyond) if beyond else 0
    return {
        "D": d, "TURNED": width, "WIDTH": pairs, "REST": rest, "DTYPE": FLOATS[dtype],
        "POSITIONS": max(1, AREA // max(pairs, rest // 4)), "HEADS": HEADS, "EACH": min(EACH, -(-heads // HEADS)),
        "num_warps": WARPS,
    }  # fmt: skip


def _is_moved(part: Rotated) -> bool:
    """Return whether the part has another output, to which unrotated features must be copied."""
    return bool(part.x.data_ptr() != part.out.data_ptr())
