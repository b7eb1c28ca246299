"""The forward kernel of Gluon's attention: a warp fetches, warpgroups of 64 rows multiply and weigh.

Keys come from the last block to the first, so that the one block whose scores are partly hidden comes before the loop, and
the loop masks nothing. OVERLAP: a block's exponentials run under the product of the weights before with their values.
TURNS: warpgroups give their products to the tensor core one after another, so that one's exponentials run under another's
products. Source of both: Shah et al., "FlashAttention-3", arXiv:2407.08608, written anew.
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
    operand,
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


@gluon.jit
def _fetch(
    fetched, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tile after tile, each warpgroup's rows, and the keys and values from the last block on."""
    q_desc, k_desc, v_desc, shared, gates, sizes = fetched
    q_shared, k_shared, v_shared = shared
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
            fetch(v_desc, b, kv, key, v_full.index(place), v_empty.index(place), phase, v_shared.index(place))
            place, phase = next_place(place, phase, STAGES)


@gluon.jit
def _first_weights(scores, scale):
    """2^(scale scores - top), their sums in parts, and top, the rows' maxima.

    top is finite: of a row that sees only -inf in this block the weights are 0, and not infinity less infinity.
    """
    top = gl.maximum(gl.max(scores, 1) * scale, LOWEST)
    weights = exp2(scores * scale - top[:, None])
    return weights, partial_sums(weights), top


@gluon.jit
def _weights(scores, scale, sums, top):
    """The same with an older block's sums and maxima; and how much everything older shrinks."""
    higher = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = exp2(scores * scale - higher[:, None])
    shrink = exp2(top - higher)
    return weights, sums * of_rows(shrink, sums) + partial_sums(weights), higher, shrink


@gluon.jit
def _leave(acc, sums, top, out_desc, place, lse, b, h, pair, first, T):
    """out through its rows' place, by TMA, which drops rows beyond T; and lse."""
    total = gl.sum(sums, 1)
    total = gl.where(total == 0.0, float("nan"), total)  # of a row whose scores are all -inf, as softmax has it
    levels = top + gl.convert_layout(gl.log2(total), top.type.layout, assert_trivial=True)
    rows = first + gl.arange(0, top.shape[0], top.type.layout)
    gl.store(lse + pair.to(gl.int64) * T + rows, levels * LN_2, rows < T)
    matrix(place).store(rounded(acc * of_rows(1.0 / total, acc), out_desc.dtype))
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
    return warpgroup_mma(q, matrix(k).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _step(
    acc, weights, sums, top, q, none, shared, gates, scale, who, place, phase, parity,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """acc with the values that the weights are for, and the next block's weights."""
    _, k_shared, v_shared = shared
    _, _, k_full, k_empty, v_full, v_empty, turns = gates
    older, older_phase = place_before(place, phase, STAGES)
    # Not rounded at the end of the block before: there their product still reads the older ones' registers.
    OUT: gl.constexpr = acc.type.layout
    left = operand(rounded(weights, k_shared.dtype), OUT)
    if OVERLAP == 0:
        mbarrier.wait(v_full.index(older), older_phase)
        if TURNS:
            take_turn(turns, who, parity)
        acc = warpgroup_mma(left, matrix(v_shared.index(older)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(older), count=1)
        mbarrier.wait(k_full.index(place), phase)
        scores = _scores(q, k_shared.index(place), none)
    else:
        mbarrier.wait(k_full.index(place), phase)
        if TURNS:
            take_turn(turns, who, parity)
        scores = _scores(q, k_shared.index(place), none)
        mbarrier.wait(v_full.index(older), older_phase)
        acc = warpgroup_mma(left, matrix(v_shared.index(older)), acc, is_async=True)
    if TURNS:
        pass_turn(turns, who, CONSUMERS)
    if OVERLAP == 1:
        scores, acc = warpgroup_mma_wait(0, deps=(scores, acc))
        mbarrier.arrive(v_empty.index(older), count=1)
    else:
        scores = warpgroup_mma_wait(1 if OVERLAP == 2 else 0, deps=(scores,))
    mbarrier.arrive(k_empty.index(place), count=1)
    weights, sums, top, shrink = _weights(scores, scale, sums, top)
    if OVERLAP == 2:
        sums = settled(sums)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(older), count=1)
    return acc * of_rows(shrink, acc), weights, sums, top


@gluon.jit
def _attend(
    made, who, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
    OVERLAP: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's rows of every tile."""
    out_desc, shared, gates, sizes, lse, scale = made
    q_shared, k_shared, v_shared = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = gates
    T, S, H, _, pairs, blocks, near, whole, rest = sizes
    KEYS: gl.constexpr = k_shared.shape[3]
    D: gl.constexpr = q_shared.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    none = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    place, phase, slot, slot_phase, parity = 0, 0, 0, 0, 0
    for turn in range(rounds(whole, rest)):
        order, pair = tile(turn, blocks, pairs, near)
        start = (blocks - 1 - order) * ROWS * CONSUMERS
        first = start + who * ROWS
        b, h = pair // H, pair % H
        count = blocks_of_keys(first, 1, T, S, KEYS, CAUSAL)
        others = blocks_of_keys(start, CONSUMERS, T, S, KEYS, CAUSAL) - count
        place, phase, parity = _pass_over(gates, others, who, place, phase, parity, CONSUMERS, STAGES, TURNS)
        at = who * SLOTS + slot
        q = matrix(q_shared.index(at))
        mbarrier.wait(q_full.index(at), slot_phase)
        mbarrier.wait(k_full.index(place), phase)
        if TURNS:
            take_turn(turns, who, parity)
        scores = _scores(q, k_shared.index(place), none)
        if TURNS:
            pass_turn(turns, who, CONSUMERS)
        parity ^= 1
        if SLOTS > 1:  # the tile's before has left by now
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(who * SLOTS + (slot + SLOTS - 1) % SLOTS), count=1, pred=turn > 0)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(place), count=1)
        if EDGE:
            scores = hidden(scores, first, (count - 1) * KEYS, S, CAUSAL)
        weights, sums, top = _first_weights(scores, scale)
        acc = gl.zeros((ROWS, D), gl.float32, OUT)
        place, phase = next_place(place, phase, STAGES)
        for _i in range(count - 1):
            acc, weights, sums, top = _step(
                acc, weights, sums, top, q, none, shared, gates, scale, who, place, phase, parity,
                CONSUMERS, STAGES, OVERLAP, TURNS,
            )  # fmt: skip
            parity ^= 1
            place, phase = next_place(place, phase, STAGES)
        left = operand(rounded(weights, q_shared.dtype), OUT)
        older, older_phase = place_before(place, phase, STAGES)
        mbarrier.wait(v_full.index(older), older_phase)
        acc = warpgroup_mma(left, matrix(v_shared.index(older)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(older), count=1)
        _leave(acc, sums, top, out_desc, q_shared.index(at), lse, b, h, pair, first, T)
        if SLOTS == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(at), count=1)
        slot, slot_phase = next_place(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def gluon_attention_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, scale, T, S, H, group, pairs, blocks, near,
    whole, rest, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr, OVERLAP: gl.constexpr, TURNS: gl.constexpr,
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
    shared, sizes = (q_shared, k_shared, v_shared), (T, S, H, group, pairs, blocks, near, whole, rest)
    fetched = (q_desc, k_desc, v_desc, shared, gates, sizes)
    made = (out_desc, shared, gates, sizes, lse, scale)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (made, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP, TURNS)),
                (_attend, (made, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP, TURNS)),
                (_fetch, (fetched, CONSUMERS, SLOTS, STAGES, CAUSAL)),
            ],
            [4, 1], [REGISTERS, FETCHING],
        )  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_attend, (made, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP, TURNS)),
                (_attend, (made, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP, TURNS)),
                (_attend, (made, 2, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP, TURNS)),
                (_fetch, (fetched, CONSUMERS, SLOTS, STAGES, CAUSAL)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, FETCHING],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 4)
        gl.warp_specialize(
            [
                (_attend, (made, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP, TURNS)),
                (_attend, (made, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP, TURNS)),
                (_attend, (made, 2, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP, TURNS)),
                (_attend, (made, 3, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP, TURNS)),
                (_fetch, (fetched, CONSUMERS, SLOTS, STAGES, CAUSAL)),
            ],
            [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, FETCHING],
        )  # fmt: skip
