"""The forward kernel of Gluon's FP8 attention: `_gluon_forward`'s order with both products in E4M3.

Values come transposed, (B, Hkv, D, S), and their keys in the order of `_fp8_quantize.in_slots`: so the weights, permuted in
their threads, are the left operand of an FP8 product where they are. FRESH: each block's product is a sum of its own that is
added in float32, for the tensor core's own sums have 14 bits; or it goes on in the tensor core.
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

from te_bench.kernels.attention._gluon_parts import (
    LN_2,
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
    pass_turn,
    place_before,
    room,
    rounded,
    rounds,
    settled,
    take_turn,
    tile,
)

OFFSET = gl.constexpr(8.0)  # P is rounded as 2^8 P: manual_fp8.WEIGHTS


@gluon.jit
def _matrix(block):
    """An FP8 block (1, 1, rows, bytes of a line) as a matrix."""
    shape: gl.constexpr = block.shape
    return block._reinterpret(block.dtype, [shape[2], shape[3]], gl.NVMMASharedLayout(shape[3], 8, 2))


@gluon.jit
def _fetch_values(desc, b, h, key, full, empty, phase, place):
    """Fill a place with a block of keys of the transposed values, once all have left it."""
    mbarrier.wait(empty, phase ^ 1)
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [b, h, 0, key], full, place)


@gluon.jit
def _fetch(
    fetched, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tile after tile, each warpgroup's rows, and the keys and values from the last block on."""
    q_desc, k_desc, v_desc, shared, gates, sizes = fetched
    q_shared, k_shared, v_shared, _ = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = gates
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
def _weights(scores, scale, sums, top):
    """2^(8 + scale scores - top) with an older block's sums and maxima; and how much everything older shrinks."""
    higher = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = exp2(scores * scale - (higher - OFFSET)[:, None])
    shrink = exp2(top - higher)
    return weights, sums * of_rows(shrink, sums) + partial_sums(weights), higher, shrink


@gluon.jit
def _leave(acc, sums, top, out_desc, place, lse, v_inv, b, h, pair, first, T):
    """out by TMA, which drops rows beyond T, once the tile before has left its place; and lse."""
    total = gl.sum(sums, 1)
    levels = top - OFFSET + gl.convert_layout(gl.log2(total), top.type.layout, assert_trivial=True)
    rows = first + gl.arange(0, top.shape[0], top.type.layout)
    gl.store(lse + pair.to(gl.int64) * T + rows, levels * LN_2, rows < T)
    tma.store_wait(0)
    matrix(place).store(rounded(acc * of_rows(v_inv / total, acc), out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [b, h, first, 0], place)


@gluon.jit
def _pass_over(
    gates, count, who, place, phase, parity, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr
):
    """Leave the next `count` blocks, which other warpgroups see, as they are."""
    _, _, k_full, k_empty, v_full, v_empty, turns = gates
    for _i in range(count):
        if TURNS:
            take_turn(turns, who, parity)
            pass_turn(turns, who, CONSUMERS)
            parity ^= 1
        mbarrier.wait(k_full.index(place), phase)
        mbarrier.arrive(k_empty.index(place), count=1)
        mbarrier.wait(v_full.index(place), phase)
        mbarrier.arrive(v_empty.index(place), count=1)
        place, phase = next_place(place, phase, STAGES)
    return place, phase, parity


@gluon.jit
def _scores(q, k, none):
    return warpgroup_mma(q, _matrix(k).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _products(left, values, acc, FRESH: gl.constexpr):
    """The weights' product with transposed values, by itself or on top of acc, not awaited."""
    return warpgroup_mma(left, _matrix(values).permute((1, 0)), acc, use_acc=not FRESH, is_async=True)


@gluon.jit
def _step(
    acc, older_shrink, weights, sums, top, q, none, nothing, shared, gates, scale, who, place, phase, parity,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, FRESH: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """acc with the values that the weights are for, and the next block's weights, made under that product."""
    _, k_shared, v_shared, _ = shared
    _, _, k_full, k_empty, v_full, v_empty, turns = gates
    older, older_phase = place_before(place, phase, STAGES)
    OUT: gl.constexpr = acc.type.layout  # Triton 3.6 takes a layout for a constant only where it has a name
    left = _operand(weights, OUT)
    mbarrier.wait(k_full.index(place), phase)
    if TURNS:
        take_turn(turns, who, parity)
    scores = _scores(q, k_shared.index(place), none)
    mbarrier.wait(v_full.index(older), older_phase)
    if FRESH:
        part = _products(left, v_shared.index(older), nothing, FRESH)
    else:
        part = _products(left, v_shared.index(older), acc, FRESH)
    if TURNS:
        pass_turn(turns, who, CONSUMERS)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(place), count=1)
    weights, sums, top, shrink = _weights(scores, scale, sums, top)
    sums = settled(sums)
    part = warpgroup_mma_wait(0, deps=(part,))
    mbarrier.arrive(v_empty.index(older), count=1)
    acc = acc * of_rows(older_shrink, acc) + part if FRESH else part * of_rows(shrink, acc)
    return acc, shrink, weights, sums, top


@gluon.jit
def _attend(
    made, who, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
    FRESH: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's rows of every tile."""
    out_desc, shared, gates, sizes, lse, scales, scale = made
    q_shared, k_shared, v_shared, out_shared = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = gates
    q_inv, k_inv, v_inv = scales
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    KEYS: gl.constexpr = k_shared.shape[3]
    D: gl.constexpr = q_shared.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    none = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    nothing = gl.zeros((ROWS, D), gl.float32, OUT)
    place, phase, slot, slot_phase, parity = 0, 0, 0, 0, 0
    for turn in range(rounds(whole, rest)):
        order, pair = tile(turn, blocks, pairs, near)
        start = (blocks - 1 - order) * ROWS * CONSUMERS
        first = start + who * ROWS
        b, h = pair // H, pair % H
        kv = b * (H // group) + h // group
        of_scores = scale * gl.load(q_inv + pair) * gl.load(k_inv + kv)
        of_values = gl.load(v_inv + kv)
        count = blocks_of_keys(first, 1, T, S, KEYS, CAUSAL)
        others = blocks_of_keys(start, CONSUMERS, T, S, KEYS, CAUSAL) - count
        place, phase, parity = _pass_over(gates, others, who, place, phase, parity, CONSUMERS, STAGES, TURNS)
        at = who * SLOTS + slot
        q = _matrix(q_shared.index(at))
        mbarrier.wait(q_full.index(at), slot_phase)
        mbarrier.wait(k_full.index(place), phase)
        if TURNS:
            take_turn(turns, who, parity)
        scores = _scores(q, k_shared.index(place), none)
        if TURNS:
            pass_turn(turns, who, CONSUMERS)
        parity ^= 1
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(place), count=1)
        if EDGE:
            scores = hidden(scores, first, (count - 1) * KEYS, S, CAUSAL)
        top = gl.max(scores, 1) * of_scores
        weights = exp2(scores * of_scores - (top - OFFSET)[:, None])
        sums = partial_sums(weights)
        shrink = gl.full_like(top, 1.0)
        acc = gl.zeros((ROWS, D), gl.float32, OUT)
        place, phase = next_place(place, phase, STAGES)
        for _i in range(count - 1):
            acc, shrink, weights, sums, top = _step(
                acc, shrink, weights, sums, top, q, none, nothing, shared, gates, of_scores, who, place, phase, parity,
                CONSUMERS, STAGES, FRESH, TURNS,
            )  # fmt: skip
            parity ^= 1
            place, phase = next_place(place, phase, STAGES)
        mbarrier.arrive(q_empty.index(at), count=1)
        left = _operand(weights, OUT)
        older, older_phase = place_before(place, phase, STAGES)
        mbarrier.wait(v_full.index(older), older_phase)
        if FRESH:
            part = _products(left, v_shared.index(older), nothing, FRESH)
        else:
            part = _products(left, v_shared.index(older), acc, FRESH)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(v_empty.index(older), count=1)
        acc = acc * of_rows(shrink, acc) + part if FRESH else part
        _leave(acc, sums, top, out_desc, out_shared.index(who), lse, of_values, b, h, pair, first, T)
        slot, slot_phase = next_place(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def gluon_fp8_attention_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, q_inv, k_inv, v_inv, scale, T, S, H, group, pairs, blocks, near,
    whole, rest, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr, FRESH: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """out and lse of `blocks` tiles of CONSUMERS x 64 rows of `pairs` sequences and heads; scale times log2(e).

    SLOTS: tiles whose rows are in shared memory at once; STAGES: blocks of keys and of values. REGISTERS: of a thread that
    multiplies, FETCHING: that fetches. EDGE: a block of keys may be partly hidden.
    """
    q_shared, k_shared, v_shared = room(q_desc, CONSUMERS * SLOTS), room(k_desc, STAGES), room(v_desc, STAGES)
    gates = (
        barriers(CONSUMERS * SLOTS, 1), barriers(CONSUMERS * SLOTS, 1),
        barriers(STAGES, 1), barriers(STAGES, CONSUMERS), barriers(STAGES, 1), barriers(STAGES, CONSUMERS),
        barriers(CONSUMERS, 1),
    )  # fmt: skip
    fence_async_shared()
    shared = (q_shared, k_shared, v_shared, room(out_desc, CONSUMERS))
    sizes = (T, S, H, group, pairs, blocks, near, whole, rest)
    fetched = (q_desc, k_desc, v_desc, shared, gates, sizes)
    made = (out_desc, shared, gates, sizes, lse, (q_inv, k_inv, v_inv), scale)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (made, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, FRESH, TURNS)),
                (_attend, (made, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, FRESH, TURNS)),
                (_fetch, (fetched, CONSUMERS, SLOTS, STAGES, CAUSAL)),
            ],
            [4, 1], [REGISTERS, FETCHING],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_attend, (made, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, FRESH, TURNS)),
                (_attend, (made, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, FRESH, TURNS)),
                (_attend, (made, 2, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, FRESH, TURNS)),
                (_fetch, (fetched, CONSUMERS, SLOTS, STAGES, CAUSAL)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, FETCHING],
        )  # fmt: skip
