"""The second backward kernel of Gluon's attention: dK and dV (terms: backward_rows). Keys are kept, rows looped over.

Scores and weights are transposed (keys by rows), so that dV's and dK's operands go from registers to the tensor core.
In a block the exponentials run during dP's product, dS is made during dV's, and the next block's scores follow dK's.
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
    allocate,
    as_matrix,
    as_operand,
    count_tiles,
    exp2,
    make_barriers,
    next_stage,
    pick_tile,
    round_to,
)


@gluon.jit
def find_row_blocks(start_n, T, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the first block of rows that see keys from start_n on (else the last ones), and the end of all blocks.

    Partly hidden blocks are the first blocks of 64 rows, and always exist: rows beyond T have weight 0.
    """
    WHOLE: gl.constexpr = max(ROWS, BLOCK_M)
    begin = 0
    if CAUSAL:
        begin = min(start_n, T - 1) // WHOLE * (WHOLE // BLOCK_M)
    return begin, gl.cdiv(T, WHOLE) * (WHOLE // BLOCK_M)


@gluon.jit
def fetch_rows(fetch_args, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Fetch, per tile, each warpgroup's keys and values, and for each query head the rows of q and dO, lse and delta.

    If q's rows end inside a block, the last row fills it: a row of 0 times a key with an infinity would be NaN.
    """
    k_desc, v_desc, q_desc, last_desc, do_desc, info_desc, shared, gates, sizes = fetch_args
    k_shared, v_shared, q_shared, do_shared, info_shared = shared
    held_full, held_empty, full, empty = gates
    T, _, H, group, pairs, blocks, near, whole, rest = sizes
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    stage, phase, slot, slot_phase = 0, 0, 0, 0
    for tile_index in range(count_tiles(whole, rest)):
        n_block, pair = pick_tile(tile_index, blocks, pairs, near)
        program_n = n_block * ROWS * CONSUMERS
        b, kv = pair // (H // group), pair % (H // group)
        for consumer in gl.static_range(CONSUMERS):
            buffer, start_n = consumer * SLOTS + slot, program_n + consumer * ROWS
            mbarrier.wait(held_empty.index(buffer), slot_phase ^ 1)
            mbarrier.expect(held_full.index(buffer), k_desc.block_type.nbytes * 2)
            tma.async_copy_global_to_shared(
                k_desc, [b, kv, start_n, 0], held_full.index(buffer), k_shared.index(buffer)
            )
            tma.async_copy_global_to_shared(
                v_desc, [b, kv, start_n, 0], held_full.index(buffer), v_shared.index(buffer)
            )
        slot, slot_phase = next_stage(slot, slot_phase, SLOTS)
        begin, end = find_row_blocks(program_n, T, BLOCK_M, CAUSAL)
        for h in range(kv * group, kv * group + group):
            for block in range(begin, end):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                ready, start_m = full.index(stage), block * BLOCK_M
                mbarrier.expect(ready, q_desc.block_type.nbytes * 2 + info_desc.block_type.nbytes)
                if start_m + BLOCK_M > T:
                    tma.async_copy_global_to_shared(last_desc, [b, h, start_m % ROWS, 0], ready, q_shared.index(stage))
                else:
                    tma.async_copy_global_to_shared(q_desc, [b, h, start_m, 0], ready, q_shared.index(stage))
                tma.async_copy_global_to_shared(info_desc, [b * H + h, 0, start_m], ready, info_shared.index(stage))
                tma.async_copy_global_to_shared(do_desc, [b, h, start_m, 0], ready, do_shared.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _add_dk_dv(
    dk, dv, k, v, q, do, info, scale, start_n, start_m, T, EDGE: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr
):
    """Start adding a block's share to dk and dv, after finishing the previous one."""
    BLOCK_M: gl.constexpr = SCORES.instr_shape[1]
    zeros = gl.zeros((ROWS, BLOCK_M), gl.float32, SCORES)
    lse_and_delta = info._reinterpret(gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    qk = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse_2 = lse_and_delta.index(0).load(gl.SliceLayout(0, SCORES))
    qk, dk, dv = warpgroup_mma_wait(1, deps=(qk, dk, dv))
    if EDGE:
        offs_n = start_n + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        offs_n = gl.where(offs_n < T, offs_n, 2**30)  # keys from T on are seen by no row, also not by padding rows
        offs_m = start_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))
        qk = gl.where(offs_n[:, None] <= offs_m[None, :], qk, float("-inf"))
    p = exp2(qk * scale - lse_2[None, :])
    dv = warpgroup_mma(as_operand(round_to(p, q.dtype), OUT), do, dv, is_async=True)
    delta = lse_and_delta.index(1).load(gl.SliceLayout(0, SCORES))
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = p * (dp - delta[None, :])
    dk = warpgroup_mma(as_operand(round_to(ds, q.dtype), OUT), q, dk, is_async=True)
    return dk, dv


@gluon.jit
def _make_dk_dv(
    args, consumer, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Process a warpgroup's keys of every tile."""
    dk_desc, dv_desc, shared, gates, sizes, scale = args
    k_shared, v_shared, q_shared, do_shared, info_shared = shared
    held_full, held_empty, full, empty = gates
    T, _, H, group, pairs, blocks, near, whole, rest = sizes
    BLOCK_M: gl.constexpr = q_shared.shape[3]
    D: gl.constexpr = q_shared.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    EDGES: gl.constexpr = CAUSAL and BLOCK_M < ROWS  # not only the first block is partly hidden
    stage, phase, slot, slot_phase = 0, 0, 0, 0
    for tile_index in range(count_tiles(whole, rest)):
        n_block, pair = pick_tile(tile_index, blocks, pairs, near)
        program_n = n_block * ROWS * CONSUMERS
        start_n = program_n + consumer * ROWS
        begin, end = find_row_blocks(start_n, T, BLOCK_M, CAUSAL)
        program_begin, _end = find_row_blocks(program_n, T, BLOCK_M, CAUSAL)
        buffer = consumer * SLOTS + slot
        k, v = as_matrix(k_shared.index(buffer)), as_matrix(v_shared.index(buffer))
        dk = gl.zeros((ROWS, D), gl.float32, OUT)
        dv = gl.zeros((ROWS, D), gl.float32, OUT)
        tma.store_wait(0)  # the previous tile's dK and dV have left their slot
        mbarrier.arrive(held_empty.index(consumer * SLOTS + (slot + SLOTS - 1) % SLOTS), count=1, pred=tile_index > 0)
        mbarrier.wait(held_full.index(buffer), slot_phase)
        k_left, v_left = k, v
        if IN_REGISTERS:
            k_left, v_left = k.load(gl.DotOperandLayout(0, SCORES, 2)), v.load(gl.DotOperandLayout(0, SCORES, 2))
        for _i in range(group):
            for _i in range(begin - program_begin):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = next_stage(stage, phase, STAGES)
            mbarrier.wait(full.index(stage), phase)
            q, do = as_matrix(q_shared.index(stage)), as_matrix(do_shared.index(stage))
            dk, dv = _add_dk_dv(
                dk, dv, k_left, v_left, q, do, info_shared.index(stage), scale, start_n, begin * BLOCK_M, T, CAUSAL,
                SCORES, OUT,
            )  # fmt: skip
            previous = stage
            stage, phase = next_stage(stage, phase, STAGES)
            for block in range(begin + 1, end):
                mbarrier.wait(full.index(stage), phase)
                q, do = as_matrix(q_shared.index(stage)), as_matrix(do_shared.index(stage))
                dk, dv = _add_dk_dv(
                    dk, dv, k_left, v_left, q, do, info_shared.index(stage), scale, start_n, block * BLOCK_M, T, EDGES,
                    SCORES, OUT,
                )  # fmt: skip
                mbarrier.arrive(empty.index(previous), count=1)
                previous = stage
                stage, phase = next_stage(stage, phase, STAGES)
            dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
            mbarrier.arrive(empty.index(previous), count=1)
        b, kv = pair // (H // group), pair % (H // group)
        k.store(round_to(dk * (scale * LN_2), dk_desc.dtype))
        v.store(round_to(dv, dv_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, [b, kv, start_n, 0], k_shared.index(buffer))
        tma.async_copy_shared_to_global(dv_desc, [b, kv, start_n, 0], v_shared.index(buffer))
        slot, slot_phase = next_stage(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def gluon_attention_backward_keys_kernel(
    k_desc, v_desc, q_desc, last_desc, do_desc, info_desc, dk_desc, dv_desc, scale, T, S, H, group, pairs, blocks,
    near, whole, rest, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of `blocks` tiles of CONSUMERS x 64 keys for `pairs` of sequence and key head."""
    HELD: gl.constexpr = CONSUMERS * SLOTS
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    gl.static_assert(CONSUMERS == 2 and SLOTS > 1 and BLOCK_M <= ROWS)
    info_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, BLOCK_M], info_desc.layout)
    shared = (
        allocate(k_desc, HELD), allocate(v_desc, HELD), allocate(q_desc, STAGES), allocate(do_desc, STAGES), info_shared,
    )  # fmt: skip
    gates = make_barriers(HELD, 1), make_barriers(HELD, 1), make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS)
    fence_async_shared()
    sizes = (T, S, H, group, pairs, blocks, near, whole, rest)
    fetch_args = (k_desc, v_desc, q_desc, last_desc, do_desc, info_desc, shared, gates, sizes)
    args = (dk_desc, dv_desc, shared, gates, sizes, scale)
    gl.warp_specialize(
        [
            (_make_dk_dv, (args, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS)),
            (_make_dk_dv, (args, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, IN_REGISTERS)),
            (fetch_rows, (fetch_args, CONSUMERS, SLOTS, STAGES, CAUSAL)),
        ],
        [4, 1],
        [REGISTERS, FETCHING],
    )
