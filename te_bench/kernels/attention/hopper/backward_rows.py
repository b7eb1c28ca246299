"""The first backward kernel of Gluon's attention: dQ. A program keeps its rows and loops over keys.

With P the weights, dP = dO V^T, delta the rows' sums of out * dO and dS = P (dP - delta): dV = P^T dO, dK = scale dS^T
Q, dQ = scale dS K. Two kernels with seven products and no atomics give the same bits in every run. This one writes
delta for the other. It goes from the last block of keys to the first, so partly hidden ones come before the loop.
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
    allocate,
    as_matrix,
    as_operand,
    count_key_blocks,
    count_tiles,
    exp2,
    make_barriers,
    mask_scores,
    next_stage,
    pick_tile,
    round_to,
)


@gluon.jit
def _fetch_keys(fetch_args, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Fetch, per tile, each warpgroup's rows of q, dO and out, and the keys and values from the last block on."""
    q_desc, do_desc, out_desc, k_desc, v_desc, shared, gates, sizes = fetch_args
    q_shared, do_shared, out_shared, k_shared, v_shared = shared
    held_full, held_empty, full, empty = gates
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    stage, phase, slot, slot_phase = 0, 0, 0, 0
    for tile_index in range(count_tiles(whole, rest)):
        m_block, pair = pick_tile(tile_index, blocks, pairs, near)
        program_m = (blocks - 1 - m_block) * ROWS * CONSUMERS
        b, h = pair // H, pair % H
        for consumer in gl.static_range(CONSUMERS):
            buffer, start_m = consumer * SLOTS + slot, program_m + consumer * ROWS
            mbarrier.wait(held_empty.index(buffer), slot_phase ^ 1)
            mbarrier.expect(held_full.index(buffer), q_desc.block_type.nbytes * 3)
            tma.async_copy_global_to_shared(q_desc, [b, h, start_m, 0], held_full.index(buffer), q_shared.index(buffer))
            tma.async_copy_global_to_shared(
                do_desc, [b, h, start_m, 0], held_full.index(buffer), do_shared.index(buffer)
            )
            tma.async_copy_global_to_shared(
                out_desc, [b, h, start_m, 0], held_full.index(buffer), out_shared.index(buffer)
            )
        slot, slot_phase = next_stage(slot, slot_phase, SLOTS)
        count = count_key_blocks(program_m, CONSUMERS, T, S, BLOCK_N, CAUSAL)
        for i in range(count):
            start_n, kv = (count - 1 - i) * BLOCK_N, h // group
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), k_desc.block_type.nbytes * 2)
            tma.async_copy_global_to_shared(k_desc, [b, kv, start_n, 0], full.index(stage), k_shared.index(stage))
            tma.async_copy_global_to_shared(v_desc, [b, kv, start_n, 0], full.index(stage), v_shared.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _sum_rows(out, do, D: gl.constexpr):
    """Return delta, the rows' sums of out * dO."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    return gl.sum(as_matrix(out).load(LAYOUT).to(gl.float32) * as_matrix(do).load(LAYOUT).to(gl.float32), 1)


@gluon.jit
def _load_lse_and_delta(out, do, lse, info, pair, start_m, T, padded, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Return lse_2 and delta of a warpgroup's rows; also store them in info (pairs, 2, padded) for the other kernel.

    lse_2: each row's logsumexp to base 2; infinity, which gives weights of 0, for rows beyond T.
    """
    offs_m = start_m + gl.arange(0, ROWS, LAYOUT)
    lse_2 = gl.load(lse + pair.to(gl.int64) * T + offs_m, offs_m < T, float("inf")) * LOG2_E
    delta = gl.convert_layout(_sum_rows(out, do, D), LAYOUT)
    target = info + pair.to(gl.int64) * 2 * padded + offs_m
    gl.store(target, lse_2, offs_m < padded)
    gl.store(target + padded, delta, offs_m < padded)
    return lse_2, delta


@gluon.jit
def _add_dq(
    dq, q, do, k, v, lse_2, delta, scale, start_m, start_n, S,
    EDGE: gl.constexpr, CAUSAL: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Start adding a block's share to dq, after finishing the previous one."""
    BLOCK_N: gl.constexpr = SCORES.instr_shape[1]
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES)
    qk = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(do, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    qk, dq = warpgroup_mma_wait(1, deps=(qk, dq))
    if EDGE:
        qk = mask_scores(qk, start_m, start_n, S, CAUSAL)
    p = exp2(qk * scale - lse_2[:, None])
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = p * (dp - delta[:, None])
    return warpgroup_mma(as_operand(round_to(ds, k.dtype), OUT), k, dq, is_async=True)


@gluon.jit
def _make_dq(
    args, consumer, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    """Process a warpgroup's rows of every tile."""
    dq_desc, shared, gates, sizes, lse, info, padded, scale = args
    q_shared, do_shared, out_shared, k_shared, v_shared = shared
    held_full, held_empty, full, empty = gates
    T, S, H, _, pairs, blocks, near, whole, rest = sizes
    BLOCK_N: gl.constexpr = k_shared.shape[3]
    D: gl.constexpr = q_shared.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage, phase, slot, slot_phase = 0, 0, 0, 0
    for tile_index in range(count_tiles(whole, rest)):
        m_block, pair = pick_tile(tile_index, blocks, pairs, near)
        program_m = (blocks - 1 - m_block) * ROWS * CONSUMERS
        start_m = program_m + consumer * ROWS
        count = count_key_blocks(start_m, 1, T, S, BLOCK_N, CAUSAL)
        for _i in range(count_key_blocks(program_m, CONSUMERS, T, S, BLOCK_N, CAUSAL) - count):
            mbarrier.wait(full.index(stage), phase)
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
        buffer = consumer * SLOTS + slot
        mbarrier.wait(held_full.index(buffer), slot_phase)
        lse_2, delta = _load_lse_and_delta(
            out_shared.index(buffer), do_shared.index(buffer), lse, info, pair, start_m, T, padded, D,
            gl.SliceLayout(1, SCORES),
        )  # fmt: skip
        if SLOTS > 1:  # the previous tile's dq has left its slot
            tma.store_wait(0)
            mbarrier.arrive(
                held_empty.index(consumer * SLOTS + (slot + SLOTS - 1) % SLOTS), count=1, pred=tile_index > 0
            )
        q, do = as_matrix(q_shared.index(buffer)), as_matrix(do_shared.index(buffer))
        dq = gl.zeros((ROWS, D), gl.float32, OUT)
        mbarrier.wait(full.index(stage), phase)
        k, v = as_matrix(k_shared.index(stage)), as_matrix(v_shared.index(stage))
        dq = _add_dq(dq, q, do, k, v, lse_2, delta, scale, start_m, (count - 1) * BLOCK_N, S, EDGE, CAUSAL, SCORES, OUT)
        previous = stage
        stage, phase = next_stage(stage, phase, STAGES)
        for _i in range(count - 1):
            mbarrier.wait(full.index(stage), phase)
            k, v = as_matrix(k_shared.index(stage)), as_matrix(v_shared.index(stage))
            dq = _add_dq(dq, q, do, k, v, lse_2, delta, scale, start_m, 0, S, False, CAUSAL, SCORES, OUT)
            mbarrier.arrive(empty.index(previous), count=1)
            previous = stage
            stage, phase = next_stage(stage, phase, STAGES)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(empty.index(previous), count=1)
        as_matrix(q_shared.index(buffer)).store(round_to(dq * (scale * LN_2), dq_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq_desc, [pair // H, pair % H, start_m, 0], q_shared.index(buffer))
        if SLOTS == 1:
            tma.store_wait(0)
            mbarrier.arrive(held_empty.index(buffer), count=1)
        slot, slot_phase = next_stage(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def gluon_attention_backward_rows_kernel(
    q_desc, do_desc, out_desc, k_desc, v_desc, dq_desc, lse, info, padded, scale, T, S, H, group, pairs, blocks, near,
    whole, rest, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """Compute dQ of `blocks` tiles of CONSUMERS x 64 rows for `pairs` of sequence and head; write lse_2, delta to info.

    scale includes log2(e). EDGE: a block of keys may be partly hidden. Other constants: as in the forward kernel.
    """
    gl.static_assert(k_desc.block_type.shape[2] % ROWS == 0, "one block of keys is partly hidden, not two")
    HELD: gl.constexpr = CONSUMERS * SLOTS
    shared = (
        allocate(q_desc, HELD),
        allocate(do_desc, HELD),
        allocate(out_desc, HELD),
        allocate(k_desc, STAGES),
        allocate(v_desc, STAGES),
    )
    gates = make_barriers(HELD, 1), make_barriers(HELD, 1), make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS)
    fence_async_shared()
    sizes = (T, S, H, group, pairs, blocks, near, whole, rest)
    fetch_args = (q_desc, do_desc, out_desc, k_desc, v_desc, shared, gates, sizes)
    args = (dq_desc, shared, gates, sizes, lse, info, padded, scale)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_make_dq, (args, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
                (_make_dq, (args, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
                (_fetch_keys, (fetch_args, CONSUMERS, SLOTS, STAGES, CAUSAL)),
            ],
            [4, 1],
            [REGISTERS, FETCHING],
        )
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_make_dq, (args, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
                (_make_dq, (args, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
                (_make_dq, (args, 2, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
                (_fetch_keys, (fetch_args, CONSUMERS, SLOTS, STAGES, CAUSAL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, FETCHING],
        )
