"""The second backward kernel of Gluon's attention: dK and dV; keys are held, rows come. What they are: _gluon_backward_rows.

Scores and weights are transposed, keys by rows, so that those of dV and dK go from register to tensor core. In a block the
exponentials run under dP's product, dS is made under dV's, and the next block's scores follow dK's.
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
    ROWS,
    SIZES,
    UNALIGNED,
    barriers,
    exp2,
    matrix,
    next_place,
    operand,
    room,
    rounded,
    rounds,
    tile,
)


@gluon.jit
def blocks_of_rows(first, T, AT_ONCE: gl.constexpr, CAUSAL: gl.constexpr):
    """The first block of rows that see any of the keys from `first` on, or else the last ones, and the end of all blocks.

    What is partly hidden are the first blocks of 64 rows, and there are as many: rows beyond T weigh nothing.
    """
    begin = 0
    if CAUSAL:
        begin = min(first, T - 1) // ROWS * (ROWS // AT_ONCE)
    return begin, gl.cdiv(T, ROWS) * (ROWS // AT_ONCE)


@gluon.jit
def fetch_rows(
    fetched, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tile after tile, each warpgroup's keys and values, and for each query head the rows of q and dO, level and delta.

    Where the rows of q end inside a block, the last one fills it: a row of 0 times a key that holds an infinity is NaN.
    """
    k_desc, v_desc, q_desc, last_desc, dout_desc, info_desc, shared, gates, sizes = fetched
    k_shared, v_shared, q_shared, dout_shared, info_shared = shared
    held, left, full, empty = gates
    T, _, H, group, pairs, blocks, near, whole, rest = sizes
    AT_ONCE: gl.constexpr = q_desc.block_type.shape[2]
    place, phase, slot, slot_phase = 0, 0, 0, 0
    for turn in range(rounds(whole, rest)):
        order, pair = tile(turn, blocks, pairs, near)
        first = order * ROWS * CONSUMERS
        b, kv = pair // (H // group), pair % (H // group)
        for who in gl.static_range(CONSUMERS):
            at, key = who * SLOTS + slot, first + who * ROWS
            mbarrier.wait(left.index(at), slot_phase ^ 1)
            mbarrier.expect(held.index(at), k_desc.block_type.nbytes * 2)
            tma.async_copy_global_to_shared(k_desc, [b, kv, key, 0], held.index(at), k_shared.index(at))
            tma.async_copy_global_to_shared(v_desc, [b, kv, key, 0], held.index(at), v_shared.index(at))
        slot, slot_phase = next_place(slot, slot_phase, SLOTS)
        begin, end = blocks_of_rows(first, T, AT_ONCE, CAUSAL)
        for h in range(kv * group, kv * group + group):
            for block in range(begin, end):
                mbarrier.wait(empty.index(place), phase ^ 1)
                ready, row = full.index(place), block * AT_ONCE
                mbarrier.expect(ready, q_desc.block_type.nbytes * 2 + info_desc.block_type.nbytes)
                if row + AT_ONCE > T:
                    tma.async_copy_global_to_shared(last_desc, [b, h, row % ROWS, 0], ready, q_shared.index(place))
                else:
                    tma.async_copy_global_to_shared(q_desc, [b, h, row, 0], ready, q_shared.index(place))
                tma.async_copy_global_to_shared(info_desc, [b * H + h, 0, row], ready, info_shared.index(place))
                tma.async_copy_global_to_shared(dout_desc, [b, h, row, 0], ready, dout_shared.index(place))
                place, phase = next_place(place, phase, STAGES)


@gluon.jit
def _key_step(
    dk, dv, k, v, q, dout, info, scale, first, row, T,
    EDGE: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """dk and dv with a block's share under way; what was under way before is over."""
    AT_ONCE: gl.constexpr = SCORES.instr_shape[1]
    none = gl.zeros((ROWS, AT_ONCE), gl.float32, SCORES)
    levels = info._reinterpret(gl.float32, [2, AT_ONCE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    scores = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
    dweights = warpgroup_mma(v, dout.permute((1, 0)), none, use_acc=False, is_async=True)
    level = levels.index(0).load(gl.SliceLayout(0, SCORES))
    scores, dk, dv = warpgroup_mma_wait(1, deps=(scores, dk, dv))
    if EDGE:
        keys = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        keys = gl.where(keys < T, keys, 2**30)  # those from T on, no row sees: nor may one beyond T
        rows = row + gl.arange(0, AT_ONCE, gl.SliceLayout(0, SCORES))
        scores = gl.where(keys[:, None] <= rows[None, :], scores, float("-inf"))
    weights = exp2(scores * scale - level[None, :])
    dv = warpgroup_mma(operand(rounded(weights, q.dtype), OUT), dout, dv, is_async=True)
    delta = levels.index(1).load(gl.SliceLayout(0, SCORES))
    dweights = warpgroup_mma_wait(1, deps=(dweights,))
    dscores = weights * (dweights - delta[None, :])
    dk = warpgroup_mma(operand(rounded(dscores, q.dtype), OUT), q, dk, is_async=True)
    return dk, dv


@gluon.jit
def _make_dk_dv(
    made, who, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's keys of every tile."""
    dk_desc, dv_desc, shared, gates, sizes, scale = made
    k_shared, v_shared, q_shared, dout_shared, info_shared = shared
    held, left, full, empty = gates
    T, _, H, group, pairs, blocks, near, whole, rest = sizes
    AT_ONCE: gl.constexpr = q_shared.shape[3]
    D: gl.constexpr = q_shared.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, AT_ONCE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    EDGES: gl.constexpr = CAUSAL and AT_ONCE < ROWS  # more than the first block is partly hidden
    place, phase, slot, slot_phase = 0, 0, 0, 0
    for turn in range(rounds(whole, rest)):
        order, pair = tile(turn, blocks, pairs, near)
        start = order * ROWS * CONSUMERS
        first = start + who * ROWS
        begin, end = blocks_of_rows(first, T, AT_ONCE, CAUSAL)
        others_begin, _end = blocks_of_rows(start, T, AT_ONCE, CAUSAL)
        at = who * SLOTS + slot
        k, v = matrix(k_shared.index(at)), matrix(v_shared.index(at))
        dk = gl.zeros((ROWS, D), gl.float32, OUT)
        dv = gl.zeros((ROWS, D), gl.float32, OUT)
        if SLOTS > 1:  # the tile's before has left by now
            tma.store_wait(0)
            mbarrier.arrive(left.index(who * SLOTS + (slot + SLOTS - 1) % SLOTS), count=1, pred=turn > 0)
        mbarrier.wait(held.index(at), slot_phase)
        k_left, v_left = k, v
        if IN_REGISTERS:
            k_left, v_left = k.load(gl.DotOperandLayout(0, SCORES, 2)), v.load(gl.DotOperandLayout(0, SCORES, 2))
        for _i in range(group):
            for _i in range(begin - others_begin):
                mbarrier.wait(full.index(place), phase)
                mbarrier.arrive(empty.index(place), count=1)
                place, phase = next_place(place, phase, STAGES)
            mbarrier.wait(full.index(place), phase)
            q, dout = matrix(q_shared.index(place)), matrix(dout_shared.index(place))
            dk, dv = _key_step(
                dk,
                dv,
                k_left,
                v_left,
                q,
                dout,
                info_shared.index(place),
                scale,
                first,
                begin * AT_ONCE,
                T,
                CAUSAL,
                SCORES,
                OUT,
            )
            older = place
            place, phase = next_place(place, phase, STAGES)
            for block in range(begin + 1, end):
                mbarrier.wait(full.index(place), phase)
                q, dout = matrix(q_shared.index(place)), matrix(dout_shared.index(place))
                dk, dv = _key_step(
                    dk, dv, k_left, v_left, q, dout, info_shared.index(place), scale, first, block * AT_ONCE, T, EDGES,
                    SCORES, OUT,
                )  # fmt: skip
                mbarrier.arrive(empty.index(older), count=1)
                older = place
                place, phase = next_place(place, phase, STAGES)
            dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
            mbarrier.arrive(empty.index(older), count=1)
        b, kv = pair // (H // group), pair % (H // group)
        k.store(rounded(dk * (scale * LN_2), dk_desc.dtype))
        v.store(rounded(dv, dv_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, [b, kv, first, 0], k_shared.index(at))
        tma.async_copy_shared_to_global(dv_desc, [b, kv, first, 0], v_shared.index(at))
        if SLOTS == 1:
            tma.store_wait(0)
            mbarrier.arrive(left.index(at), count=1)
        slot, slot_phase = next_place(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def gluon_attention_backward_keys_kernel(
    k_desc, v_desc, q_desc, last_desc, dout_desc, info_desc, dk_desc, dv_desc, scale, T, S, H, group, pairs, blocks,
    near, whole, rest, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV of `blocks` tiles of CONSUMERS x 64 keys of `pairs` sequences and heads of keys."""
    HELD: gl.constexpr = CONSUMERS * SLOTS
    AT_ONCE: gl.constexpr = q_desc.block_type.shape[2]
    gl.static_assert(AT_ONCE <= ROWS)
    info_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, AT_ONCE], info_desc.layout)
    shared = (room(k_desc, HELD), room(v_desc, HELD), room(q_desc, STAGES), room(dout_desc, STAGES), info_shared)
    gates = barriers(HELD, 1), barriers(HELD, 1), barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    fence_async_shared()
    sizes = (T, S, H, group, pairs, blocks, near, whole, rest)
    fetched = (k_desc, v_desc, q_desc, last_desc, dout_desc, info_desc, shared, gates, sizes)
    made = (dk_desc, dv_desc, shared, gates, sizes, scale)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_make_dk_dv, (made, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS)),
                (_make_dk_dv, (made, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS)),
                (fetch_rows, (fetched, CONSUMERS, SLOTS, STAGES, CAUSAL)),
            ],
            [4, 1], [REGISTERS, FETCHING],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_make_dk_dv, (made, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS)),
                (_make_dk_dv, (made, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS)),
                (_make_dk_dv, (made, 2, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS)),
                (fetch_rows, (fetched, CONSUMERS, SLOTS, STAGES, CAUSAL)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, FETCHING],
        )  # fmt: skip
