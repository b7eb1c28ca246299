"""The backward pass of FP8 attention for Hopper in one kernel, in Gluon: `_gluon_backward_fused` with S and dP in E4M3.

Held are the keys and values in FP8, for S and dP, and the keys as they came, for dQ; rows come in FP8 with level and delta,
and as they came, in rings of their own, for the former are done with when dS is made. What a product in FP8 saves is shared
memory's time as much as the tensor core's: it reads half the bytes.
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

from te_bench.kernels.attention.hopper.backward_fused import add_rows, columns_of, hidden_rows
from te_bench.kernels.attention.hopper.backward_keys import blocks_of_rows
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
    positive,
    room,
    rounded,
    rounds,
    tile,
)


@gluon.jit
def _both(place, desc):
    """The keys' place and the values', in FP8, in that of dV."""
    shape: gl.constexpr = desc.block_type.shape
    return place._reinterpret(desc.dtype, [2, 1, 1, shape[2], shape[3]], desc.layout)


@gluon.jit
def _fetch(
    fetched, CONSUMERS: gl.constexpr, FP8_STAGES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tile after tile, each warpgroup's keys and values, and for each query head the rows of q and dO, level and delta."""
    k8_desc, v8_desc, k_desc, q8_desc, dout8_desc, q_desc, dout_desc, info_desc, shared, gates, sizes = fetched
    held_shared, k_shared, q8_shared, dout8_shared, q_shared, dout_shared, info_shared = shared
    held, left, full8, empty8, full, empty = gates
    T, _, H, group, pairs, blocks, near, whole, rest = sizes
    place8, phase8, place, phase = 0, 0, 0, 0
    for turn in range(rounds(whole, rest)):
        order, pair = tile(turn, blocks, pairs, near)
        first = order * ROWS * CONSUMERS
        b, kv = pair // (H // group), pair % (H // group)
        for who in gl.static_range(CONSUMERS):
            key, there = first + who * ROWS, held.index(who)
            mbarrier.wait(left.index(who), turn & 1 ^ 1)
            mbarrier.expect(there, k8_desc.block_type.nbytes * 2 + k_desc.block_type.nbytes)
            both = _both(held_shared.index(who), k8_desc)
            tma.async_copy_global_to_shared(k8_desc, [b, kv, key, 0], there, both.index(0))
            tma.async_copy_global_to_shared(v8_desc, [b, kv, key, 0], there, both.index(1))
            tma.async_copy_global_to_shared(k_desc, [b, kv, key, 0], there, k_shared.index(who))
        begin, end = blocks_of_rows(first, T, ROWS, CAUSAL)
        for h in range(kv * group, kv * group + group):
            for block in range(begin, end):
                row = block * ROWS
                mbarrier.wait(empty8.index(place8), phase8 ^ 1)
                ready = full8.index(place8)
                mbarrier.expect(ready, q8_desc.block_type.nbytes * 2 + info_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(q8_desc, [b, h, row, 0], ready, q8_shared.index(place8))
                tma.async_copy_global_to_shared(dout8_desc, [b, h, row, 0], ready, dout8_shared.index(place8))
                tma.async_copy_global_to_shared(info_desc, [b * H + h, 0, row], ready, info_shared.index(place8))
                place8, phase8 = next_place(place8, phase8, FP8_STAGES)
                mbarrier.wait(empty.index(place), phase ^ 1)
                ready = full.index(place)
                mbarrier.expect(ready, q_desc.block_type.nbytes * 2)
                tma.async_copy_global_to_shared(dout_desc, [b, h, row, 0], ready, dout_shared.index(place))
                tma.async_copy_global_to_shared(q_desc, [b, h, row, 0], ready, q_shared.index(place))
                place, phase = next_place(place, phase, STAGES)


@gluon.jit
def _step(
    dk, dv, k8, v8, k_shared, dscores_shared, who, first, S, come8, come, gates8, gates, given, row, turn, parity, columns,
    scale, back, CONSUMERS: gl.constexpr, EDGE: gl.constexpr, CAUSAL: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """dk and dv with a block's share, dq's added to its columns. EDGE: the block may be partly hidden."""
    q8, dout8, info = come8
    q, dout = come
    full8, empty8, phase8 = gates8
    full, empty, phase = gates
    WIDTH: gl.constexpr = OUT.instr_shape[1] // CONSUMERS
    SHARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    none = gl.zeros((ROWS, ROWS), gl.float32, SCORES)
    levels = info._reinterpret(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.wait(full8, phase8)
    scores = warpgroup_mma(k8, q8.permute((1, 0)), none, use_acc=False, is_async=True)
    dweights = warpgroup_mma(v8, dout8.permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if EDGE:
        scores = hidden_rows(scores, first + who * ROWS, row, S, CAUSAL)
    level = levels.index(0).load(gl.SliceLayout(0, SCORES))
    weights = exp2(scores * scale - level[None, :])
    left = rounded(weights, q.dtype)
    mbarrier.wait(full, phase)
    dv = warpgroup_mma(operand(left, OUT), dout, dv, is_async=True)
    weights = left.to(gl.float32)  # dV's product keeps these registers in any case
    delta = levels.index(1).load(gl.SliceLayout(0, SCORES))
    dweights = warpgroup_mma_wait(1, deps=(dweights,))
    mbarrier.arrive(empty8, count=1)
    dscores = rounded(weights * (dweights * back - delta[None, :]), q.dtype)
    # Two places: who writes here has seen all of the block before, and by then the others were done with the one before it.
    dscores_shared.index(turn * CONSUMERS + who).store(dscores)
    fence_async_shared()
    mbarrier.arrive(given.index(turn), count=1)
    mbarrier.wait(given.index(turn), parity)
    dq = gl.zeros((ROWS, WIDTH), gl.float32, SHARE)
    for other in gl.static_range(CONSUMERS):
        keys = matrix(k_shared.index(other)).slice(who * WIDTH, WIDTH, dim=1)
        by_rows = dscores_shared.index(turn * CONSUMERS + other).permute((1, 0))
        dq = warpgroup_mma(by_rows, keys, dq, use_acc=other > 0, is_async=True)
    dk = warpgroup_mma(operand(dscores, OUT), q, dk, is_async=True)
    dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
    add_rows(columns, row, dq, OUT.instr_shape[1])
    # Were it in flight when the next block's scores begin, the assembler would serialise all products (C7512).
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(empty, count=1)
    return dk, dv


@gluon.jit
def _make_all(
    made, who, CONSUMERS: gl.constexpr, FP8_STAGES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    """A warpgroup's keys of every tile, and its columns of the tile's share of dQ."""
    k8_desc, dk_desc, dv_desc, shared, dscores_shared, gates, given, over, sizes, scales, sums, padded, scale = made
    held_shared, k_shared, q8_shared, dout8_shared, q_shared, dout_shared, info_shared = shared
    held, left, full8, empty8, full, empty = gates
    q_inv, k_inv, v_inv, dout_inv = scales
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    D: gl.constexpr = q_shared.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    both = _both(held_shared.index(who), k8_desc)
    k8, v8 = matrix(both.index(0)), matrix(both.index(1))
    place8, phase8, place, phase, step = 0, 0, 0, 0, 0
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
        dk = gl.zeros((ROWS, D), gl.float32, OUT)
        dv = gl.zeros((ROWS, D), gl.float32, OUT)
        for other in gl.static_range(CONSUMERS):
            mbarrier.wait(held.index(other), turn & 1)
        for h in range(kv * group, kv * group + group):
            columns = columns_of(sums, b * H + h, who, padded, CONSUMERS, D)
            of_scores = positive(scale * gl.load(q_inv + b * H + h) * gl.load(k_inv + pair))
            back = gl.load(dout_inv + b * H + h) * gl.load(v_inv + pair)
            for HIDING in gl.static_range(1 if EDGE else 0, -1, -1):  # a loop that masks, then one that needs not ask
                start, stop = edges, end
                if HIDING:
                    start, stop = begin, edges
                for row in range(start, stop, ROWS):
                    come8 = (
                        matrix(q8_shared.index(place8)),
                        matrix(dout8_shared.index(place8)),
                        info_shared.index(place8),
                    )
                    come = matrix(q_shared.index(place)), matrix(dout_shared.index(place))
                    gates8 = full8.index(place8), empty8.index(place8), phase8
                    dk, dv = _step(
                        dk, dv, k8, v8, k_shared, dscores_shared, who, first, S, come8, come, gates8,
                        (full.index(place), empty.index(place), phase), given, row, step & 1, step >> 1 & 1, columns,
                        of_scores, back, CONSUMERS, HIDING > 0, CAUSAL, SCORES, OUT,
                    )  # fmt: skip
                    place8, phase8 = next_place(place8, phase8, FP8_STAGES)
                    place, phase = next_place(place, phase, STAGES)
                    step += 1
        matrix(held_shared.index(who)).store(rounded(dv, dv_desc.dtype))
        mbarrier.arrive(over, count=1)
        mbarrier.wait(over, turn & 1)  # the others' dQ is of these keys too
        matrix(k_shared.index(who)).store(rounded(dk * (scale * LN_2), dk_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, [b, kv, first + who * ROWS, 0], k_shared.index(who))
        tma.async_copy_shared_to_global(dv_desc, [b, kv, first + who * ROWS, 0], held_shared.index(who))
        tma.store_wait(0)
        mbarrier.arrive(left.index(who), count=1)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def fp8_attention_backward_gluon_kernel(
    k8_desc, v8_desc, k_desc, q8_desc, dout8_desc, q_desc, dout_desc, info_desc, dk_desc, dv_desc,
    q_inv, k_inv, v_inv, dout_inv, sums, padded, scale, T, S, H, group, pairs, blocks, near, whole, rest,
    CONSUMERS: gl.constexpr, FP8_STAGES: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """dK and dV of `blocks` tiles of 2 x 64 keys of `pairs` sequences and heads of keys; their share of dQ added to sums.

    sums and scale as gluon_attention_backward_fused_kernel has them. EDGE: a block of rows may be partly hidden, or keys
    beyond S are there.
    """
    gl.static_assert(CONSUMERS == 2 and q_desc.block_type.shape[2] == 64 and q_desc.block_type.shape[3] == 128)
    info_shared = gl.allocate_shared_memory(gl.float32, [FP8_STAGES, 1, 2, 64], info_desc.layout)
    shared = (
        room(dv_desc, CONSUMERS), room(k_desc, CONSUMERS), room(q8_desc, FP8_STAGES), room(dout8_desc, FP8_STAGES),
        room(q_desc, STAGES), room(dout_desc, STAGES), info_shared,
    )  # fmt: skip
    dscores_shared = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    gates = (
        barriers(CONSUMERS, 1), barriers(CONSUMERS, 1), barriers(FP8_STAGES, 1), barriers(FP8_STAGES, CONSUMERS),
        barriers(STAGES, 1), barriers(STAGES, CONSUMERS),
    )  # fmt: skip
    given, over = barriers(2, CONSUMERS), barriers(1, CONSUMERS).index(0)
    fence_async_shared()
    sizes, scales = (T, S, H, group, pairs, blocks, near, whole, rest), (q_inv, k_inv, v_inv, dout_inv)
    fetched = (k8_desc, v8_desc, k_desc, q8_desc, dout8_desc, q_desc, dout_desc, info_desc, shared, gates, sizes)
    made = (k8_desc, dk_desc, dv_desc, shared, dscores_shared, gates, given, over, sizes, scales, sums, padded, scale)
    gl.warp_specialize(
        [
            (_make_all, (made, 0, CONSUMERS, FP8_STAGES, STAGES, CAUSAL, EDGE)),
            (_make_all, (made, 1, CONSUMERS, FP8_STAGES, STAGES, CAUSAL, EDGE)),
            (_fetch, (fetched, CONSUMERS, FP8_STAGES, STAGES, CAUSAL)),
        ],
        [4, 1], [REGISTERS, FETCHING],
    )  # fmt: skip
