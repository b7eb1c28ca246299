"""The first backward kernel of Gluon's attention: dQ; rows are held, keys come.

With P the weights, dP = dO V^T, delta the rows' sums of out * dO and dS = P (dP - delta): dV = P^T dO, dK = scale dS^T Q,
dQ = scale dS K. Two kernels and seven products, no atomics, so the same bits in every run. This one leaves delta to the
other. Keys come from the last block on: what is partly hidden comes before the loop.
Source: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2.
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
    LOG2_E,
    ROWS,
    SIZES,
    UNALIGNED,
    barriers,
    blocks_of_keys,
    exp2,
    hidden,
    matrix,
    next_place,
    operand,
    room,
    rounded,
    rounds,
    tile,
)


@gluon.jit
def _fetch_keys(
    fetched, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tile after tile, each warpgroup's rows of q, dO and out, and the keys and values from the last block on."""
    q_desc, dout_desc, out_desc, k_desc, v_desc, shared, gates, sizes = fetched
    q_shared, dout_shared, out_shared, k_shared, v_shared = shared
    held, left, full, empty = gates
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    place, phase, slot, slot_phase = 0, 0, 0, 0
    for turn in range(rounds(whole, rest)):
        order, pair = tile(turn, blocks, pairs, near)
        first = (blocks - 1 - order) * ROWS * CONSUMERS
        b, h = pair // H, pair % H
        for who in gl.static_range(CONSUMERS):
            at, row = who * SLOTS + slot, first + who * ROWS
            mbarrier.wait(left.index(at), slot_phase ^ 1)
            mbarrier.expect(held.index(at), q_desc.block_type.nbytes * 3)
            tma.async_copy_global_to_shared(q_desc, [b, h, row, 0], held.index(at), q_shared.index(at))
            tma.async_copy_global_to_shared(dout_desc, [b, h, row, 0], held.index(at), dout_shared.index(at))
            tma.async_copy_global_to_shared(out_desc, [b, h, row, 0], held.index(at), out_shared.index(at))
        slot, slot_phase = next_place(slot, slot_phase, SLOTS)
        count = blocks_of_keys(first, CONSUMERS, T, S, KEYS, CAUSAL)
        for i in range(count):
            key, kv = (count - 1 - i) * KEYS, h // group
            mbarrier.wait(empty.index(place), phase ^ 1)
            mbarrier.expect(full.index(place), k_desc.block_type.nbytes * 2)
            tma.async_copy_global_to_shared(k_desc, [b, kv, key, 0], full.index(place), k_shared.index(place))
            tma.async_copy_global_to_shared(v_desc, [b, kv, key, 0], full.index(place), v_shared.index(place))
            place, phase = next_place(place, phase, STAGES)


@gluon.jit
def _row_sums(out, dout, D: gl.constexpr):
    """delta, the rows' sums of out * dO."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    return gl.sum(matrix(out).load(LAYOUT).to(gl.float32) * matrix(dout).load(LAYOUT).to(gl.float32), 1)


@gluon.jit
def _levels(out, dout, lse, info, pair, first, T, padded, D: gl.constexpr, LAYOUT: gl.constexpr):
    """level and delta of a warpgroup's rows, both also left in info (pairs, 2, padded) for the pass over the rows.

    level: the logarithm, to base 2, of the rows' sums; infinity, whose weights are 0, for rows that are none.
    """
    rows = first + gl.arange(0, ROWS, LAYOUT)
    level = gl.load(lse + pair.to(gl.int64) * T + rows, rows < T, float("inf")) * LOG2_E
    delta = gl.convert_layout(_row_sums(out, dout, D), LAYOUT)
    at = info + pair.to(gl.int64) * 2 * padded + rows
    gl.store(at, level, rows < padded)
    gl.store(at + padded, delta, rows < padded)
    return level, delta


@gluon.jit
def _row_step(
    dq, q, dout, k, v, level, delta, scale, first, key, S,
    EDGE: gl.constexpr, CAUSAL: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """dq with a block's share under way; what was under way before is over."""
    KEYS: gl.constexpr = SCORES.instr_shape[1]
    none = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    scores = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    dweights = warpgroup_mma(dout, v.permute((1, 0)), none, use_acc=False, is_async=True)
    scores, dq = warpgroup_mma_wait(1, deps=(scores, dq))
    if EDGE:
        scores = hidden(scores, first, key, S, CAUSAL)
    weights = exp2(scores * scale - level[:, None])
    dweights = warpgroup_mma_wait(0, deps=(dweights,))
    dscores = weights * (dweights - delta[:, None])
    return warpgroup_mma(operand(rounded(dscores, k.dtype), OUT), k, dq, is_async=True)


@gluon.jit
def _make_dq(
    made, who, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    IN_REGISTERS: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """A warpgroup's rows of every tile."""
    dq_desc, shared, gates, sizes, lse, info, padded, scale = made
    q_shared, dout_shared, out_shared, k_shared, v_shared = shared
    held, left, full, empty = gates
    T, S, H, _, pairs, blocks, near, whole, rest = sizes
    KEYS: gl.constexpr = k_shared.shape[3]
    D: gl.constexpr = q_shared.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    place, phase, slot, slot_phase = 0, 0, 0, 0
    for turn in range(rounds(whole, rest)):
        order, pair = tile(turn, blocks, pairs, near)
        start = (blocks - 1 - order) * ROWS * CONSUMERS
        first = start + who * ROWS
        count = blocks_of_keys(first, 1, T, S, KEYS, CAUSAL)
        for _i in range(blocks_of_keys(start, CONSUMERS, T, S, KEYS, CAUSAL) - count):
            mbarrier.wait(full.index(place), phase)
            mbarrier.arrive(empty.index(place), count=1)
            place, phase = next_place(place, phase, STAGES)
        at = who * SLOTS + slot
        mbarrier.wait(held.index(at), slot_phase)
        level, delta = _levels(
            out_shared.index(at), dout_shared.index(at), lse, info, pair, first, T, padded, D, gl.SliceLayout(1, SCORES)
        )
        if SLOTS > 1:  # the tile's before has left by now
            tma.store_wait(0)
            mbarrier.arrive(left.index(who * SLOTS + (slot + SLOTS - 1) % SLOTS), count=1, pred=turn > 0)
        q, dout = matrix(q_shared.index(at)), matrix(dout_shared.index(at))
        if IN_REGISTERS:
            q, dout = q.load(gl.DotOperandLayout(0, SCORES, 2)), dout.load(gl.DotOperandLayout(0, SCORES, 2))
        dq = gl.zeros((ROWS, D), gl.float32, OUT)
        mbarrier.wait(full.index(place), phase)
        k, v = matrix(k_shared.index(place)), matrix(v_shared.index(place))
        dq = _row_step(dq, q, dout, k, v, level, delta, scale, first, (count - 1) * KEYS, S, EDGE, CAUSAL, SCORES, OUT)
        older = place
        place, phase = next_place(place, phase, STAGES)
        for _i in range(count - 1):
            mbarrier.wait(full.index(place), phase)
            k, v = matrix(k_shared.index(place)), matrix(v_shared.index(place))
            dq = _row_step(dq, q, dout, k, v, level, delta, scale, first, 0, S, False, CAUSAL, SCORES, OUT)
            mbarrier.arrive(empty.index(older), count=1)
            older = place
            place, phase = next_place(place, phase, STAGES)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(empty.index(older), count=1)
        matrix(q_shared.index(at)).store(rounded(dq * (scale * LN_2), dq_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq_desc, [pair // H, pair % H, first, 0], q_shared.index(at))
        if SLOTS == 1:
            tma.store_wait(0)
            mbarrier.arrive(left.index(at), count=1)
        slot, slot_phase = next_place(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def gluon_attention_backward_rows_kernel(
    q_desc, dout_desc, out_desc, k_desc, v_desc, dq_desc, lse, info, padded, scale, T, S, H, group, pairs, blocks, near,
    whole, rest, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, IN_REGISTERS: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """dQ of `blocks` tiles of CONSUMERS x 64 rows of `pairs` sequences and heads; level and delta in info.

    scale times log2(e). EDGE: a block of keys may be partly hidden. The other constants: as in the forward kernel.
    """
    HELD: gl.constexpr = CONSUMERS * SLOTS
    shared = (
        room(q_desc, HELD),
        room(dout_desc, HELD),
        room(out_desc, HELD),
        room(k_desc, STAGES),
        room(v_desc, STAGES),
    )
    gates = barriers(HELD, 1), barriers(HELD, 1), barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    fence_async_shared()
    sizes = (T, S, H, group, pairs, blocks, near, whole, rest)
    fetched = (q_desc, dout_desc, out_desc, k_desc, v_desc, shared, gates, sizes)
    made = (dq_desc, shared, gates, sizes, lse, info, padded, scale)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_make_dq, (made, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS, EDGE)),
                (_make_dq, (made, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS, EDGE)),
                (_fetch_keys, (fetched, CONSUMERS, SLOTS, STAGES, CAUSAL)),
            ],
            [4, 1], [REGISTERS, FETCHING],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_make_dq, (made, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS, EDGE)),
                (_make_dq, (made, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS, EDGE)),
                (_make_dq, (made, 2, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS, EDGE)),
                (_fetch_keys, (fetched, CONSUMERS, SLOTS, STAGES, CAUSAL)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, FETCHING],
        )  # fmt: skip
