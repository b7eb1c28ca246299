# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Shared code of fused attention's forward and backward kernels: tiles, visibility of scores, dropout.

Indices: i is a query's row, j a key. Row i sees key j if i - left <= j <= i + right and no mask hides it; causal is
right = 0 without a left end.
"""

import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.tile import INTERPRETED

ROWS_MOST = 128  # of a tile
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3e38)  # about float32's lowest finite number
# MASK: none, one for all rows, any.
NO_MASK, OF_KEYS, OF_SCORES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Rounds of Philox 4x32: the fewest that pass BigCrush (Salmon et al., "Parallel Random Numbers", 2011).
ROUNDS = tl.constexpr(7)


@triton.jit
def dot(a, b, acc):
    """Return acc + a b in float32; float32 operands are multiplied in full precision."""
    if INTERPRETED:  # its products use bf16's bits (Triton 3.7)
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def await_product(x):
    """Return float32 x, waiting for its product here instead of at the next addition."""
    if INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_maxima(x):
    """Return the maximum of each row; NaN if any element is."""
    if INTERPRETED:  # it would run a custom reduction element by element
        return tl.max(x, 1)
    else:
        return tl.reduce(x, 1, larger_or_nan)


def within_reach(x: Tensor) -> Tensor:
    """Return x (B, H, T, D), or a copy if rows are not contiguous or a tile's rows exceed 32-bit offsets.

    64-bit row offsets would spill 88 bytes in D128's backward kernel. It also copies if rows are one element apart,
    because empty_like could then permute the dimensions.
    """
    near = x.stride(-1) == 1 and 1 not in x.stride()[:-1] and x.stride(2) * ROWS_MOST < 2**31
    return x if near else x.contiguous()


@triton.jit
def load_tile(
    base, stride, first, limit, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
):
    """Load rows first to first + ROWS of (limit, WIDTH), 0 beyond; WHOLE: none is beyond."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    at = base + first.to(tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    if WIDTH == COLUMNS:
        if WHOLE:
            return tl.load(at)
        else:
            return tl.load(at, mask=(first + rows < limit)[:, None], other=0.0)
    else:
        inside = (columns < WIDTH)[None, :]
        if not WHOLE:
            inside = inside & (first + rows < limit)[:, None]
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_tile(base, stride, first, limit, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Store x into rows first to first + ROWS of (limit, WIDTH), without those beyond."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (first + rows < limit)[:, None]
    if WIDTH != COLUMNS:
        inside = inside & (columns < WIDTH)[None, :]
    tl.store(base + first.to(tl.int64) * stride + rows[:, None] * stride + columns[None, :], x, mask=inside)


@triton.jit
def is_visible(
    rows, keys, limits, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr
):
    """Return whether row i sees key j; rows and keys are a column and a row of indices, or a row and a column."""
    T, S, left, right, mask, mask_t, mask_s = limits
    if HAS_RIGHT:
        visible = keys <= rows + right
        if not WHOLE:
            visible = visible & (keys < S)
    else:
        visible = keys < S
    if HAS_LEFT:
        visible = visible & (keys >= rows - left)
    if MASK == OF_KEYS:
        visible = visible & (tl.load(mask + keys.to(tl.int64) * mask_s, mask=keys < S, other=1) == 0)
    if MASK == OF_SCORES:
        at = mask + rows.to(tl.int64) * mask_t + keys.to(tl.int64) * mask_s
        visible = visible & (tl.load(at, mask=(rows < T) & (keys < S), other=1) == 0)
    return visible


@triton.constexpr_function
def has_part(part: int, has_left: bool, has_right: bool, mask: int, whole: bool) -> bool:
    """Return whether key blocks exist before, among or after (part 0, 1, 2) those that all rows of a tile see."""
    return (has_left, mask == NO_MASK, has_right or mask != NO_MASK or not whole)[part]


@triton.jit
def dropout_factors(seed, head, row, key, dropout, ROWS: tl.constexpr, KEYS: tl.constexpr, ACROSS: tl.constexpr):
    """Return 1 / (1 - dropout) where the weight of row i and key j stays, else 0, independent of tiling.

    Rows begin at `row`, keys at `key`: (ROWS, KEYS), or (KEYS, ROWS) if ACROSS. One Philox counter serves four keys.
    """
    i = (row + tl.arange(0, ROWS)).to(tl.int32)
    j = (key // 4 + tl.arange(0, KEYS // 4)).to(tl.int32)
    if ACROSS:
        c0 = j[:, None] + 0 * i[None, :]
        c1 = i[None, :] + 0 * j[:, None]
    else:
        c0 = j[None, :] + 0 * i[:, None]
        c1 = i[:, None] + 0 * j[None, :]
    c2 = 0 * c0 + head.to(tl.int32)
    c3 = 0 * c0 + tl.load(seed + 1).to(tl.int32)
    a, b, c, d = tl.philox(tl.load(seed), c0, c1, c2, c3, n_rounds=ROUNDS)
    bits = tl.join(tl.join(a, c), tl.join(b, d))  # the last two dimensions x and y are for key 4 j + 2 x + y
    bits = tl.reshape(tl.permute(bits, (0, 2, 3, 1)), (KEYS, ROWS)) if ACROSS else tl.reshape(bits, (ROWS, KEYS))
    uniform = (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # times 2^-24: in [0, 1), exact
    return tl.where(uniform >= dropout, 1.0 / tl.maximum(1.0 - dropout, 1e-30), 0.0)


@triton.jit
def find_sequence(starts, b):
    """Return (where packed sequence b begins, its length)."""
    begin = tl.load(starts + b).to(tl.int32)
    return begin, tl.load(starts + b + 1).to(tl.int32) - begin


@triton.jit
def pick_tile(pid, blocks, heads, heads_in_l2):
    """Return (block of a head, head) of a program: block 0 of `heads_in_l2` heads, then their block 1, and so on.

    If block 0 is the heaviest, the last programs are short. The keys and values of `heads_in_l2` heads fit in the L2.
    """
    section = pid // (blocks * heads_in_l2)
    first = section * heads_in_l2
    count = tl.minimum(heads - first, heads_in_l2)
    inside = pid - section * blocks * heads_in_l2
    return inside // count, first + inside % count


@triton.jit
def key_range(
    first, S, left, right, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Return begin, inner, outer, end: rows first to first + ROWS see keys of [begin, end) only, all of [inner, outer).

    All but end are multiples of KEYS.
    """
    begin = tl.full((), 0, tl.int32)
    end = S
    if HAS_LEFT:
        begin = tl.minimum(tl.maximum(first - left, 0), S) // KEYS * KEYS
    if HAS_RIGHT:
        end = tl.minimum(S, first + ROWS + right)
    inner = begin
    outer = end // KEYS * KEYS
    if HAS_LEFT:
        inner = tl.maximum(tl.cdiv(tl.maximum(first + ROWS - 1 - left, 0), KEYS) * KEYS, begin)
    if HAS_RIGHT:
        outer = tl.minimum(S, first + right + 1) // KEYS * KEYS
    if MASK != NO_MASK:
        inner = begin
        outer = begin
    if HAS_LEFT:  # a window narrower than the tile
        inner = tl.minimum(inner, tl.cdiv(end, KEYS) * KEYS)
    return begin, inner, tl.maximum(outer, inner), end


@triton.jit
def row_range(
    first, T, S, left, right, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Return begin, inner, outer, end: only rows [begin, end) see any of keys first to first + KEYS; [inner, outer)
    all.

    All but end are multiples of ROWS. Keys beyond S put every block on the edge, rows beyond T their own. Under a mask
    no others are: all blocks check it.
    """
    begin = tl.full((), 0, tl.int32)
    end = T
    if HAS_RIGHT:
        begin = tl.minimum(tl.maximum(first - right, 0), T) // ROWS * ROWS
    if HAS_LEFT:
        end = tl.minimum(T, first + KEYS + left)
    inner = begin
    outer = tl.minimum(tl.cdiv(end, ROWS), T // ROWS) * ROWS
    if MASK == NO_MASK:
        if HAS_RIGHT:
            inner = tl.minimum(tl.cdiv(tl.maximum(first + KEYS - 1 - right, 0), ROWS) * ROWS, outer)
        inner = tl.where(first + KEYS > S, outer, inner)
        if HAS_LEFT:
            outer = tl.minimum(tl.maximum(first + left + 1, 0) // ROWS * ROWS, outer)
    inner = tl.maximum(inner, begin)
    return begin, inner, tl.maximum(outer, inner), end
