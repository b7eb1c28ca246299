"""All of the backward pass of Gluon's attention in one kernel: dK and dV of keys that are held, and their share of dQ.

Five products where _gluon_backward_rows and _gluon_backward_keys have seven. The price: programs add to dQ, in float32 and
in no order, so not the same bits in every run. Scores are transposed, as in _gluon_backward_keys; dS also goes to shared
memory and meets the other warpgroup's, for dQ = dS K is over both's keys: each makes half of its columns, which leave from
registers under dK's product, for shared memory already moves all it can (docs/attention.md).
Source: Shah et al., "FlashAttention-3", arXiv:2407.08608, written anew.
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

from te_bench.kernels.attention.hopper.backward_keys import blocks_of_rows, fetch_rows
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
def hidden_rows(scores, first, row, S, CAUSAL: gl.constexpr):
    """The scores of keys from `first` on and rows from `row` on, -inf where they are not seen.

    In eights of rows: the numbers that differ by thread are then few, and live outside of the loop in few registers.
    """
    eights = gl.reshape(scores, (scores.shape[0], scores.shape[1] // 8, 8))
    LAYOUT: gl.constexpr = eights.type.layout
    keys = first + gl.arange(0, eights.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    if CAUSAL:
        inside = row + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        eight = 8 * gl.arange(0, eights.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        keys = gl.where(keys < S, keys, 2**30)
        see = keys[:, None, None] - inside[None, None, :] <= eight[None, :, None]
    else:
        see = (keys < S)[:, None, None]
    eights = gl.where(see, eights, float("-inf"))
    return gl.convert_layout(gl.reshape(eights, scores.shape), scores.type.layout, assert_trivial=True)


@gluon.jit
def _in_order(dq):
    """dq (64, N) in one line: 8 columns after 8, of each a warp's share, a thread's, and there rows 0 and 8 x columns 0, 1.

    So nothing leaves its thread, which has 4 numbers in a row, and a warp 128. attention_dq_of_sums_kernel reads it.
    """
    apart = gl.reshape(dq, (4, 2, 8, dq.shape[1] // 8, 4, 2))
    return gl.reshape(gl.permute(apart, (3, 0, 2, 4, 1, 5)), (dq.shape[0] * dq.shape[1],))


@gluon.jit
def columns_of(sums, head, who, padded, CONSUMERS: gl.constexpr, D: gl.constexpr):
    """A warpgroup's in the sums of a sequence's head."""
    return sums + head.to(gl.int64) * padded * D + who * (ROWS * D // CONSUMERS)


@gluon.jit
def add_rows(columns, row, dq, D: gl.constexpr):
    line = _in_order(dq)
    gl.atomic_add(columns + row * D + gl.arange(0, line.shape[0], line.type.layout), line, sem="relaxed")


@gluon.jit
def _fused_step(
    dk, dv, held, who, first, S, come, row, given, turn, parity, columns, scale, CONSUMERS: gl.constexpr,
    SLOTS: gl.constexpr, EDGE: gl.constexpr, CAUSAL: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """dk and dv with a block's share, dq's added to its columns. EDGE: the block may be partly hidden."""
    k_shared, v_shared, dscores_shared, slot = held
    q, dout, info = come
    WIDTH: gl.constexpr = OUT.instr_shape[1] // CONSUMERS
    SHARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    none = gl.zeros((ROWS, ROWS), gl.float32, SCORES)
    levels = info._reinterpret(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k, v = matrix(k_shared.index(who * SLOTS + slot)), matrix(v_shared.index(who * SLOTS + slot))
    scores = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
    dweights = warpgroup_mma(v, dout.permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if EDGE:
        scores = hidden_rows(scores, first + who * ROWS, row, S, CAUSAL)
    level = levels.index(0).load(gl.SliceLayout(0, SCORES))
    weights = exp2(scores * scale - level[None, :])
    left = rounded(weights, q.dtype)
    dv = warpgroup_mma(operand(left, OUT), dout, dv, is_async=True)
    weights = left.to(gl.float32)  # dV's product keeps these registers in any case
    delta = levels.index(1).load(gl.SliceLayout(0, SCORES))
    dweights = warpgroup_mma_wait(1, deps=(dweights,))
    dscores = rounded(weights * (dweights - delta[None, :]), q.dtype)
    # Two places: who writes here has seen all of the block before, and by then the others were done with the one before it.
    dscores_shared.index(turn * CONSUMERS + who).store(dscores)
    fence_async_shared()
    mbarrier.arrive(given.index(turn), count=1)
    mbarrier.wait(given.index(turn), parity)
    dq = gl.zeros((ROWS, WIDTH), gl.float32, SHARE)
    for other in gl.static_range(CONSUMERS):
        keys = matrix(k_shared.index(other * SLOTS + slot)).slice(who * WIDTH, WIDTH, dim=1)
        by_rows = dscores_shared.index(turn * CONSUMERS + other).permute((1, 0))
        dq = warpgroup_mma(by_rows, keys, dq, use_acc=other > 0, is_async=True)
    dk = warpgroup_mma(operand(dscores, OUT), q, dk, is_async=True)
    dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
    add_rows(columns, row, dq, OUT.instr_shape[1])
    # Were it in flight when the next block's scores begin, the assembler would serialise all products (C7512).
    dk = warpgroup_mma_wait(0, deps=(dk,))
    return dk, dv


@gluon.jit
def _make_all(
    made, who, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """A warpgroup's keys of every tile, and its columns of the tile's share of dQ."""
    dk_desc, dv_desc, shared, dscores_shared, gates, given, over, sizes, sums, padded, scale = made
    k_shared, v_shared, q_shared, dout_shared, info_shared = shared
    held, left, full, empty = gates
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    if CAUSAL:  # keys from T on, no row sees: nor may one beyond T
        S = min(S, T)
    D: gl.constexpr = q_shared.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    place, phase, slot, slot_phase, step = 0, 0, 0, 0, 0
    for turn in range(rounds(whole, rest)):
        order, pair = tile(turn, blocks, pairs, near)
        first = order * ROWS * CONSUMERS
        b, kv = pair // (H // group), pair % (H // group)
        first_block, last_block = blocks_of_rows(first, T, ROWS, CAUSAL)
        begin, end = first_block * ROWS, last_block * ROWS
        edges = begin  # until there blocks may be partly hidden
        if CAUSAL:
            edges = min(first + ROWS * CONSUMERS, end)
        if first + ROWS * CONSUMERS > S:
            edges = end
        at = who * SLOTS + slot
        dk = gl.zeros((ROWS, D), gl.float32, OUT)
        dv = gl.zeros((ROWS, D), gl.float32, OUT)
        if SLOTS > 1:  # the tile's before has left by now
            tma.store_wait(0)
            mbarrier.arrive(left.index(who * SLOTS + (slot + SLOTS - 1) % SLOTS), count=1, pred=turn > 0)
        for other in gl.static_range(CONSUMERS):
            mbarrier.wait(held.index(other * SLOTS + slot), slot_phase)
        for h in range(kv * group, kv * group + group):
            columns = columns_of(sums, b * H + h, who, padded, CONSUMERS, D)
            for HIDING in gl.static_range(1 if EDGE else 0, -1, -1):  # a loop that masks, then one that needs not ask
                start, stop = edges, end
                if HIDING:
                    start, stop = begin, edges
                for row in range(start, stop, ROWS):
                    mbarrier.wait(full.index(place), phase)
                    come = matrix(q_shared.index(place)), matrix(dout_shared.index(place)), info_shared.index(place)
                    dk, dv = _fused_step(
                        dk, dv, (k_shared, v_shared, dscores_shared, slot), who, first, S, come, row, given, step & 1,
                        step >> 1 & 1, columns, scale, CONSUMERS, SLOTS, HIDING > 0, CAUSAL, SCORES, OUT,
                    )  # fmt: skip
                    mbarrier.arrive(empty.index(place), count=1)
                    place, phase = next_place(place, phase, STAGES)
                    step += 1
        matrix(v_shared.index(at)).store(rounded(dv, dv_desc.dtype))
        mbarrier.arrive(over, count=1)
        mbarrier.wait(over, turn & 1)  # the others' dQ is of these keys too
        matrix(k_shared.index(at)).store(rounded(dk * (scale * LN_2), dk_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, [b, kv, first + who * ROWS, 0], k_shared.index(at))
        tma.async_copy_shared_to_global(dv_desc, [b, kv, first + who * ROWS, 0], v_shared.index(at))
        if SLOTS == 1:
            tma.store_wait(0)
            mbarrier.arrive(left.index(at), count=1)
        slot, slot_phase = next_place(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def gluon_attention_backward_fused_kernel(
    k_desc, v_desc, q_desc, last_desc, dout_desc, info_desc, dk_desc, dv_desc, sums, padded, scale, T, S, H, group, pairs,
    blocks, near, whole, rest, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """dK and dV of `blocks` tiles of 2 x 64 keys of `pairs` sequences and heads of keys; their share of dQ added to sums.

    sums: float32 (sequences, heads, padded rows, 128), not scaled; 64 rows' two halves of columns each as _in_order has it.
    scale times log2(e). EDGE: a block of rows may be partly hidden, or keys beyond S are there.
    """
    HELD: gl.constexpr = CONSUMERS * SLOTS
    gl.static_assert(CONSUMERS == 2 and q_desc.block_type.shape[2] == 64 and q_desc.block_type.shape[3] == 128)
    info_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, 64], info_desc.layout)
    shared = (room(k_desc, HELD), room(v_desc, HELD), room(q_desc, STAGES), room(dout_desc, STAGES), info_shared)
    dscores_shared = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    gates = barriers(HELD, 1), barriers(HELD, 1), barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    given, over = barriers(2, CONSUMERS), barriers(1, CONSUMERS).index(0)
    fence_async_shared()
    sizes = (T, S, H, group, pairs, blocks, near, whole, rest)
    fetched = (k_desc, v_desc, q_desc, last_desc, dout_desc, info_desc, shared, gates, sizes)
    made = (dk_desc, dv_desc, shared, dscores_shared, gates, given, over, sizes, sums, padded, scale)
    gl.warp_specialize(
        [
            (_make_all, (made, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
            (_make_all, (made, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
            (fetch_rows, (fetched, CONSUMERS, SLOTS, STAGES, CAUSAL)),
        ],
        [4, 1], [REGISTERS, FETCHING],
    )  # fmt: skip
