"""The forward kernel of FP8 attention for Hopper, in Gluon: `_gluon_forward`'s tiles with both products in E4M3.

Three warpgroups share each block of keys and values, which TMA fetches: blocks for 64 rows alone ask of the L2 more than it
gives. One weighs under another's products, and none under its own, whose registers there are not. Values come transposed by
blocks of 128 keys in the order of `_fp8_quantize.in_slots`: so the weights, permuted in their threads, are the left operand
of an FP8 product where they are. Each block's product is a sum of its own that is added in float32, for the tensor core's
own sums have 14 bits; by halves of the features, so that fewer registers hold it.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from te_bench.kernels.attention.fp8_quantize import PADDED
from te_bench.kernels.attention.hopper.parts import (
    LN_2,
    LOWEST,
    ROWS,
    SIZES,
    UNALIGNED,
    barriers,
    blocks_of_keys,
    exp2,
    fetch,
    hidden,
    matrix,
    next_place,
    of_rows,
    partial_sums,
    positive,
    room,
    rounded,
    rounds,
    tile,
)

BLOCK = gl.constexpr(PADDED)
OFFSET = gl.constexpr(8.0)  # P is rounded as 2^8 P: manual_fp8.WEIGHTS
SWIZZLE = gl.constexpr(32)  # bytes of a line of out in shared memory; of 128 a thread would keep four addresses


@gluon.jit
def _lines(block):
    """A block (1, 1, rows, D) of out as a matrix."""
    shape: gl.constexpr = block.shape
    return block._reinterpret(block.dtype, [shape[2], shape[3]], gl.NVMMASharedLayout(SWIZZLE, 16, 2))


@gluon.jit
def _fetch_values(desc, b, h, key, full, empty, phase, place):
    """Fill a place with a block of keys of the transposed values, once all have left it."""
    mbarrier.wait(empty, phase ^ 1)
    mbarrier.expect(full, desc.block_type.nbytes)
    D: gl.constexpr = desc.block_type.shape[2]
    tma.async_copy_global_to_shared(desc, [b, h, key // BLOCK * D, key % BLOCK], full, place)


@gluon.jit
def _fetch(
    fetched, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tile after tile, each warpgroup's rows, and the keys and values from the last block on."""
    q_desc, k_desc, v_desc, shared, gates, sizes = fetched
    q_shared, k_shared, v_shared, _ = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty = gates
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    place, phase, slot, slot_phase = 0, 0, 0, 0
    for turn in range(rounds(whole, rest)):
        order, pair = tile(turn, blocks, pairs, near)
        first = (blocks - 1 - order) * ROWS * CONSUMERS
        b, h = pair // H, pair % H
        for who in gl.static_range(CONSUMERS):
            at = who * SLOTS + slot
            fetch(q_desc, b, h, first + who * ROWS, q_full.index(at), q_empty.index(at), slot_phase, q_shared.index(at))
        slot, slot_phase = next_place(slot, slot_phase, SLOTS)
        count = blocks_of_keys(first, CONSUMERS, T, S, KEYS, CAUSAL)
        for i in range(count):
            key, kv = (count - 1 - i) * KEYS, h // group
            fetch(k_desc, b, kv, key, k_full.index(place), k_empty.index(place), phase, k_shared.index(place))
            _fetch_values(v_desc, b, kv, key, v_full.index(place), v_empty.index(place), phase, v_shared.index(place))
            place, phase = next_place(place, phase, STAGES)


@gluon.jit
def _operand(weights, OUT: gl.constexpr):
    """The weights in E4M3 as the left operand of a product into OUT, their keys in slots; nothing leaves its thread."""
    ROWS_HERE: gl.constexpr = weights.shape[0]
    KEYS: gl.constexpr = weights.shape[1]
    apart = gl.permute(gl.reshape(weights, (ROWS_HERE, KEYS // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    slots = gl.reshape(apart, (ROWS_HERE, KEYS))
    there = gl.convert_layout(slots, gl.DotOperandLayout(0, OUT, 4), assert_trivial=True)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [there], dtype=gl.uint8, is_pure=True, pack=4,
    ).to(gl.float8e4nv, bitcast=True)  # fmt: skip


@gluon.jit
def _row_sums(x):
    """The sums of what a thread has of each row."""
    left, right = gl.split(gl.reshape(partial_sums(x), (x.shape[0], 4, 2)))
    return left + right


@gluon.jit
def _weights(scores, scale, sums, top):
    """2^(8 + scale scores - top) with an older block's sums and maxima; and how much everything older shrinks."""
    higher = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = exp2(scores * scale - (higher - OFFSET)[:, None])
    shrink = exp2(top - higher)
    return weights, sums * of_rows(shrink, sums) + _row_sums(weights), higher, shrink


@gluon.jit
def _leave(low, high, sums, top, out_desc, place, lse, v_inv, b, h, pair, first, T):
    """out by TMA, which drops rows beyond T, once the tile before has left its place; and lse."""
    total = gl.sum(sums, 1)
    levels = top - OFFSET + gl.convert_layout(gl.log2(total), top.type.layout, assert_trivial=True)
    rows = first + gl.arange(0, top.shape[0], top.type.layout)
    gl.store(lse + pair.to(gl.int64) * T + rows, levels * LN_2, rows < T)
    by = gl.load(v_inv) / total
    tma.store_wait(0)
    HALF: gl.constexpr = low.shape[1]
    there = _lines(place)
    there.slice(0, HALF, 1).store(rounded(low * of_rows(by, low), out_desc.dtype))
    there.slice(HALF, HALF, 1).store(rounded(high * of_rows(by, high), out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [b, h, first, 0], place)


@gluon.jit
def _pass_over(gates, count, place, phase, STAGES: gl.constexpr):
    """Leave the next `count` blocks, which other warpgroups see, as they are."""
    _, _, k_full, k_empty, v_full, v_empty = gates
    for _i in range(count):
        mbarrier.wait(k_full.index(place), phase)
        mbarrier.arrive(k_empty.index(place), count=1)
        mbarrier.wait(v_full.index(place), phase)
        mbarrier.arrive(v_empty.index(place), count=1)
        place, phase = next_place(place, phase, STAGES)
    return place, phase


@gluon.jit
def _added(acc, left, values, nothing, shrink, WHICH: gl.constexpr):
    """acc, shrunk, and the weights' product with a half of the transposed values' features."""
    HALF: gl.constexpr = nothing.shape[1]
    half = matrix(values).slice(WHICH * HALF, HALF, 0)
    part = warpgroup_mma(left, half.permute((1, 0)), nothing, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=(part,))
    return acc * of_rows(shrink, acc) + part


@gluon.jit
def _step(
    low, high, sums, top, q, none, nothing, shared, gates, scale, place, phase, first, key, S,
    CAUSAL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """One more block: its scores, its weights, what they weigh, one after the other. EDGE: from key on, partly hidden."""
    _, k_shared, v_shared, _ = shared
    _, _, k_full, k_empty, v_full, v_empty = gates
    OUT: gl.constexpr = nothing.type.layout  # Triton 3.6 takes a layout for a constant only where it has a name
    mbarrier.wait(k_full.index(place), phase)
    k = matrix(k_shared.index(place)).permute((1, 0))
    scores = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(place), count=1)
    if EDGE:
        scores = hidden(scores, first, key, S, CAUSAL)
    weights, sums, top, shrink = _weights(scores, scale, sums, top)
    left = _operand(weights, OUT)
    mbarrier.wait(v_full.index(place), phase)
    low = _added(low, left, v_shared.index(place), nothing, shrink, 0)
    high = _added(high, left, v_shared.index(place), nothing, shrink, 1)
    mbarrier.arrive(v_empty.index(place), count=1)
    return low, high, sums, top


@gluon.jit
def _attend(
    made, who, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """A warpgroup's rows of every tile."""
    out_desc, shared, gates, sizes, lse, scales, scale = made
    q_shared, k_shared, _, out_shared = shared
    q_full, q_empty, _, _, _, _ = gates
    q_inv, k_inv, v_inv = scales
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    KEYS: gl.constexpr = k_shared.shape[3]
    HALF: gl.constexpr = q_shared.shape[4] // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    none = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    nothing = gl.zeros((ROWS, HALF), gl.float32, OUT)
    place, phase, slot, slot_phase = 0, 0, 0, 0
    for turn in range(rounds(whole, rest)):
        order, pair = tile(turn, blocks, pairs, near)
        start = (blocks - 1 - order) * ROWS * CONSUMERS
        first = start + who * ROWS
        b, h = pair // H, pair % H
        kv = b * (H // group) + h // group
        of_scores = positive(scale * gl.load(q_inv + pair) * gl.load(k_inv + kv))
        count = blocks_of_keys(first, 1, T, S, KEYS, CAUSAL)
        others = blocks_of_keys(start, CONSUMERS, T, S, KEYS, CAUSAL) - count
        place, phase = _pass_over(gates, others, place, phase, STAGES)
        at = who * SLOTS + slot
        q = matrix(q_shared.index(at))
        mbarrier.wait(q_full.index(at), slot_phase)
        # Not the first block's product: ptxas would have it begin where the others' are, and keep P in memory.
        low, high, sums = nothing, nothing, _row_sums(none)
        top = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        if EDGE:
            count -= 1
            low, high, sums, top = _step(
                low, high, sums, top, q, none, nothing, shared, gates, of_scores, place, phase, first, count * KEYS, S,
                CAUSAL, True,
            )  # fmt: skip
            place, phase = next_place(place, phase, STAGES)
        for _i in range(count):
            low, high, sums, top = _step(
                low, high, sums, top, q, none, nothing, shared, gates, of_scores, place, phase, first, 0, S, CAUSAL, False,
            )  # fmt: skip
            place, phase = next_place(place, phase, STAGES)
        mbarrier.arrive(q_empty.index(at), count=1)
        _leave(low, high, sums, top, out_desc, out_shared.index(who), lse, v_inv + kv, b, h, pair, first, T)
        slot, slot_phase = next_place(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def fp8_attention_forward_gluon_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, q_inv, k_inv, v_inv, scale, T, S, H, group, pairs, blocks, near,
    whole, rest, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """out and lse of `blocks` tiles of CONSUMERS x 64 rows of `pairs` sequences and heads; scale times log2(e).

    SLOTS: tiles whose rows are in shared memory at once; STAGES: blocks of keys and of values. REGISTERS: of a thread that
    multiplies, FETCHING: that fetches. EDGE: a block of keys may be partly hidden.
    """
    q_shared, k_shared, v_shared = room(q_desc, CONSUMERS * SLOTS), room(k_desc, STAGES), room(v_desc, STAGES)
    gates = (
        barriers(CONSUMERS * SLOTS, 1), barriers(CONSUMERS * SLOTS, 1),
        barriers(STAGES, 1), barriers(STAGES, CONSUMERS), barriers(STAGES, 1), barriers(STAGES, CONSUMERS),
    )  # fmt: skip
    fence_async_shared()
    shared = (q_shared, k_shared, v_shared, room(out_desc, CONSUMERS))
    sizes = (T, S, H, group, pairs, blocks, near, whole, rest)
    fetched = (q_desc, k_desc, v_desc, shared, gates, sizes)
    made = (out_desc, shared, gates, sizes, lse, (q_inv, k_inv, v_inv), scale)
    gl.static_assert(CONSUMERS == 3)
    gl.warp_specialize(
        [
            (_attend, (made, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
            (_attend, (made, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
            (_attend, (made, 2, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
            (_fetch, (fetched, CONSUMERS, SLOTS, STAGES, CAUSAL)),
        ],
        [4, 4, 1], [REGISTERS, REGISTERS, FETCHING],
    )  # fmt: skip
