"""The backward pass of FP8 attention for Hopper in one kernel, in Gluon: `backward_fused` with S and dP in E4M3.

A program keeps keys and values in FP8, for S and dP, and the unquantised keys, for dQ. Rows arrive in FP8 with lse and
delta, and unquantised, in separate rings, because the former are free once dS is made. An FP8 product saves as much
shared-memory time as tensor-core time: it reads half the bytes.
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

from te_bench.kernels.attention.hopper.backward_fused import (
    add_dq_and_dk,
    find_dq_columns,
    find_masked_rows,
    mask_scores_in_eights,
    store_dk_and_dv,
)
from te_bench.kernels.attention.hopper.backward_keys import find_row_blocks
from te_bench.kernels.attention.hopper.parts import (
    ROWS,
    SIZES,
    UNALIGNED,
    allocate,
    as_matrix,
    as_operand,
    count_tiles,
    exp2,
    keep_positive,
    make_barriers,
    next_stage,
    pick_tile,
    round_to,
)


@gluon.jit
def _split_dv_stage(stage, desc):
    """Return memory for the FP8 keys and values inside dV's."""
    shape: gl.constexpr = desc.block_type.shape
    return stage._reinterpret(desc.dtype, [2, 1, 1, shape[2], shape[3]], desc.layout)


@gluon.jit
def _fetch(fetch_args, CONSUMERS: gl.constexpr, FP8_STAGES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Fetch, per tile, each warpgroup's keys and values, and per query head the rows of q and dO, lse and delta."""
    k8_desc, v8_desc, k_desc, q8_desc, do8_desc, q_desc, do_desc, info_desc, shared, gates, sizes = fetch_args
    held_shared, k_shared, q8_shared, do8_shared, q_shared, do_shared, info_shared = shared
    held_full, held_empty, full8, empty8, full, empty = gates
    T, _, H, group, pairs, blocks, near, whole, rest = sizes
    stage8, phase8, stage, phase = 0, 0, 0, 0
    for tile_index in range(count_tiles(whole, rest)):
        n_block, pair = pick_tile(tile_index, blocks, pairs, near)
        program_n = n_block * ROWS * CONSUMERS
        b, kv = pair // (H // group), pair % (H // group)
        for consumer in gl.static_range(CONSUMERS):
            start_n, ready = program_n + consumer * ROWS, held_full.index(consumer)
            mbarrier.wait(held_empty.index(consumer), tile_index & 1 ^ 1)
            mbarrier.expect(ready, k8_desc.block_type.nbytes * 2 + k_desc.block_type.nbytes)
            kv8 = _split_dv_stage(held_shared.index(consumer), k8_desc)
            tma.async_copy_global_to_shared(k8_desc, [b, kv, start_n, 0], ready, kv8.index(0))
            tma.async_copy_global_to_shared(v8_desc, [b, kv, start_n, 0], ready, kv8.index(1))
            tma.async_copy_global_to_shared(k_desc, [b, kv, start_n, 0], ready, k_shared.index(consumer))
        begin, end = find_row_blocks(program_n, T, ROWS, CAUSAL)
        for h in range(kv * group, kv * group + group):
            for block in range(begin, end):
                start_m = block * ROWS
                mbarrier.wait(empty8.index(stage8), phase8 ^ 1)
                ready = full8.index(stage8)
                mbarrier.expect(ready, q8_desc.block_type.nbytes * 2 + info_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(q8_desc, [b, h, start_m, 0], ready, q8_shared.index(stage8))
                tma.async_copy_global_to_shared(do8_desc, [b, h, start_m, 0], ready, do8_shared.index(stage8))
                tma.async_copy_global_to_shared(info_desc, [b * H + h, 0, start_m], ready, info_shared.index(stage8))
                stage8, phase8 = next_stage(stage8, phase8, FP8_STAGES)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                ready = full.index(stage)
                mbarrier.expect(ready, q_desc.block_type.nbytes * 2)
                tma.async_copy_global_to_shared(do_desc, [b, h, start_m, 0], ready, do_shared.index(stage))
                tma.async_copy_global_to_shared(q_desc, [b, h, start_m, 0], ready, q_shared.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _add_gradients(
    dk, dv, shared, consumer, program_n, S, arrived8, arrived, gates8, gates, ds_ready, start_m, buffer, parity, dq_columns,
    scale, dp_scale, CONSUMERS: gl.constexpr, EDGE: gl.constexpr, CAUSAL: gl.constexpr, SCORES: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Return dk and dv with a block's share; add dq's to its columns. EDGE: the block may be partly hidden."""
    k8, v8, k_shared, ds_shared = shared
    q8, do8, info = arrived8
    q, do = arrived
    full8, empty8, phase8 = gates8
    full, empty, phase = gates
    zeros = gl.zeros((ROWS, ROWS), gl.float32, SCORES)
    lse_and_delta = info._reinterpret(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.wait(full8, phase8)
    qk = warpgroup_mma(k8, q8.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v8, do8.permute((1, 0)), zeros, use_acc=False, is_async=True)
    qk = warpgroup_mma_wait(1, deps=(qk,))
    if EDGE:
        qk = mask_scores_in_eights(qk, program_n + consumer * ROWS, start_m, S, CAUSAL)
    lse_2 = lse_and_delta.index(0).load(gl.SliceLayout(0, SCORES))
    p = exp2(qk * scale - lse_2[None, :])
    p_low = round_to(p, q.dtype)
    mbarrier.wait(full, phase)
    dv = warpgroup_mma(as_operand(p_low, OUT), do, dv, is_async=True)
    p = p_low.to(gl.float32)  # dV's product keeps these registers anyway
    delta = lse_and_delta.index(1).load(gl.SliceLayout(0, SCORES))
    dp = warpgroup_mma_wait(1, deps=(dp,))
    mbarrier.arrive(empty8, count=1)
    ds = round_to(p * (dp * dp_scale - delta[None, :]), q.dtype)
    dk, dv = add_dq_and_dk(
        dk, dv, ds, q, k_shared, ds_shared, consumer, start_m, ds_ready, buffer, parity, dq_columns, CONSUMERS, OUT
    )
    mbarrier.arrive(empty, count=1)
    return dk, dv


@gluon.jit
def _make_gradients(
    args, consumer, CONSUMERS: gl.constexpr, FP8_STAGES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    """Process a warpgroup's keys of every tile, and its columns of the tile's share of dQ."""
    descs, shared, ds_shared, gates, ds_ready, keys_free, sizes, scales, sums, scale = args
    k8_desc, dk_desc, dv_desc = descs
    dq_sum, padded = sums
    held_shared, k_shared, q8_shared, do8_shared, q_shared, do_shared, info_shared = shared
    held_full, held_empty, full8, empty8, full, empty = gates
    q_inv, k_inv, v_inv, do_inv = scales
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    D: gl.constexpr = q_shared.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    kv8 = _split_dv_stage(held_shared.index(consumer), k8_desc)
    k8, v8 = as_matrix(kv8.index(0)), as_matrix(kv8.index(1))
    stage8, phase8, stage, phase, n_step = 0, 0, 0, 0, 0
    for tile_index in range(count_tiles(whole, rest)):
        n_block, pair = pick_tile(tile_index, blocks, pairs, near)
        program_n = n_block * ROWS * CONSUMERS
        b, kv = pair // (H // group), pair % (H // group)
        begin, masked_end, end = find_masked_rows(program_n, T, S, CONSUMERS, CAUSAL, ROWS)
        dk = gl.zeros((ROWS, D), gl.float32, OUT)
        dv = gl.zeros((ROWS, D), gl.float32, OUT)
        for other in gl.static_range(CONSUMERS):
            mbarrier.wait(held_full.index(other), tile_index & 1)
        for h in range(kv * group, kv * group + group):
            dq_columns = find_dq_columns(dq_sum, b * H + h, consumer, padded, CONSUMERS, D, ROWS)
            qk_scale = keep_positive(scale * gl.load(q_inv + b * H + h) * gl.load(k_inv + pair))
            dp_scale = gl.load(do_inv + b * H + h) * gl.load(v_inv + pair)
            for MASKED in gl.static_range(1 if EDGE else 0, -1, -1):  # one loop with masks, then one without
                start, stop = masked_end, end
                if MASKED:
                    start, stop = begin, masked_end
                for start_m in range(start, stop, ROWS):
                    q8, do8 = as_matrix(q8_shared.index(stage8)), as_matrix(do8_shared.index(stage8))
                    arrived8 = q8, do8, info_shared.index(stage8)
                    arrived = as_matrix(q_shared.index(stage)), as_matrix(do_shared.index(stage))
                    gates8 = full8.index(stage8), empty8.index(stage8), phase8
                    dk, dv = _add_gradients(
                        dk, dv, (k8, v8, k_shared, ds_shared), consumer, program_n, S, arrived8, arrived, gates8,
                        (full.index(stage), empty.index(stage), phase), ds_ready, start_m, n_step & 1, n_step >> 1 & 1,
                        dq_columns, qk_scale, dp_scale, CONSUMERS, MASKED > 0, CAUSAL, SCORES, OUT,
                    )  # fmt: skip
                    stage8, phase8 = next_stage(stage8, phase8, FP8_STAGES)
                    stage, phase = next_stage(stage, phase, STAGES)
                    n_step += 1
        store_dk_and_dv(
            dk, dv, (dk_desc, dv_desc), (k_shared, held_shared), consumer, b, kv, program_n, keys_free, tile_index & 1,
            held_empty, scale,
        )  # fmt: skip


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def fp8_attention_backward_gluon_kernel(
    k8_desc, v8_desc, k_desc, q8_desc, do8_desc, q_desc, do_desc, info_desc, dk_desc, dv_desc,
    q_inv, k_inv, v_inv, do_inv, dq_sum, padded, scale, T, S, H, group, pairs, blocks, near, whole, rest,
    CONSUMERS: gl.constexpr, FP8_STAGES: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of `blocks` tiles of 2 x 64 keys for `pairs` of sequence and key head; add their dQ to dq_sum.

    dq_sum and scale: as in gluon_attention_backward_fused_kernel. EDGE: a block of rows may be partly hidden, or keys
    beyond S exist.
    """
    gl.static_assert(CONSUMERS == 2 and q_desc.block_type.shape[2] == 64 and q_desc.block_type.shape[3] == 128)
    info_shared = gl.allocate_shared_memory(gl.float32, [FP8_STAGES, 1, 2, 64], info_desc.layout)
    shared = (
        allocate(dv_desc, CONSUMERS), allocate(k_desc, CONSUMERS),
        allocate(q8_desc, FP8_STAGES), allocate(do8_desc, FP8_STAGES),
        allocate(q_desc, STAGES), allocate(do_desc, STAGES), info_shared,
    )  # fmt: skip
    ds_shared = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    gates = (
        make_barriers(CONSUMERS, 1), make_barriers(CONSUMERS, 1),
        make_barriers(FP8_STAGES, 1), make_barriers(FP8_STAGES, CONSUMERS),
        make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS),
    )  # fmt: skip
    ds_ready, keys_free = make_barriers(2, CONSUMERS), make_barriers(1, CONSUMERS).index(0)
    fence_async_shared()
    sizes, scales = (T, S, H, group, pairs, blocks, near, whole, rest), (q_inv, k_inv, v_inv, do_inv)
    fetch_args = (k8_desc, v8_desc, k_desc, q8_desc, do8_desc, q_desc, do_desc, info_desc, shared, gates, sizes)
    descs, sums = (k8_desc, dk_desc, dv_desc), (dq_sum, padded)
    args = (descs, shared, ds_shared, gates, ds_ready, keys_free, sizes, scales, sums, scale)
    gl.warp_specialize(
        [
            (_make_gradients, (args, 0, CONSUMERS, FP8_STAGES, STAGES, CAUSAL, EDGE)),
            (_make_gradients, (args, 1, CONSUMERS, FP8_STAGES, STAGES, CAUSAL, EDGE)),
            (_fetch, (fetch_args, CONSUMERS, FP8_STAGES, STAGES, CAUSAL)),
        ],
        [4, 1],
        [REGISTERS, FETCHING],
    )
