"""The whole backward pass of Gluon's attention in one kernel: dK and dV of the program's keys, and their share of dQ.

It has five products, where backward_rows and backward_keys have seven. The price: programs add to dQ in float32 and in
no fixed order, so its bits differ from run to run. Scores are transposed, as in backward_keys. dS also goes to shared
memory, because dQ = dS K is over both warpgroups' keys, and each computes half of dQ. That half is added from
registers, during dK's product, or with AHEAD by TMA, during the next block's scores (benchmarks/NOTES.md).
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

from te_bench.kernels.attention.hopper.backward_keys import fetch_rows, find_row_blocks
from te_bench.kernels.attention.hopper.parts import (
    LN_2,
    ROWS,
    SIZES,
    UNALIGNED,
    add_to_global,
    allocate,
    as_matrix,
    as_operand,
    count_tiles,
    exp2,
    make_barriers,
    meet,
    next_stage,
    pick_tile,
    previous_stage,
    round_to,
    widen,
)


@gluon.jit
def mask_scores_in_eights(qk, start_n, start_m, S, CAUSAL: gl.constexpr):
    """Mask qk of keys from start_n on and rows from start_m on: -inf where a row does not see a key.

    It works on groups of eight rows: few numbers then differ by thread, held in few registers outside the loop.
    """
    eights = gl.reshape(qk, (qk.shape[0], qk.shape[1] // 8, 8))
    LAYOUT: gl.constexpr = eights.type.layout
    offs_n = start_n + gl.arange(0, eights.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    if CAUSAL:
        offs_in_eight = start_m + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        eights_m = 8 * gl.arange(0, eights.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        offs_n = gl.where(offs_n < S, offs_n, 2**30)
        visible = offs_n[:, None, None] - offs_in_eight[None, None, :] <= eights_m[None, :, None]
    else:
        visible = (offs_n < S)[:, None, None]
    eights = gl.where(visible, eights, float("-inf"))
    return gl.convert_layout(gl.reshape(eights, qk.shape), qk.type.layout, assert_trivial=True)


@gluon.jit
def _flatten_dq(dq):
    """Flatten dq (64, N): 8 columns after 8; within them by warp, then thread: rows 0 and 8 x columns 0, 1.

    So no data moves between threads: a thread has 4 numbers in a row, a warp 128. attention_dq_of_sums_kernel reads it.
    """
    in_pairs = gl.reshape(dq, (4, 2, 8, dq.shape[1] // 8, 4, 2))
    return gl.reshape(gl.permute(in_pairs, (3, 0, 2, 4, 1, 5)), (dq.shape[0] * dq.shape[1],))


@gluon.jit
def find_dq_columns(dq_sum, head, consumer, padded, CONSUMERS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return the address of a warpgroup's share of dQ in the sums of a sequence's head."""
    return dq_sum + head.to(gl.int64) * padded * D + consumer * (BLOCK_M * D // CONSUMERS)


@gluon.jit
def find_dq_blocks(head, consumer, padded, CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return `find_dq_columns` as a number of blocks of 64 x 64."""
    return head * (padded // BLOCK_M * CONSUMERS) + consumer


@gluon.jit
def add_dq(dq_columns, start_m, dq, D: gl.constexpr):
    line = _flatten_dq(dq)
    gl.atomic_add(dq_columns + start_m * D + gl.arange(0, line.shape[0], line.type.layout), line, sem="relaxed")


@gluon.jit
def add_dq_by_tma(dq_desc, block, dq, dq_stage):
    """Add dq (64, 64) to a block of the sums through shared memory that belongs to the warpgroup."""
    tma.store_wait(0)
    line = _flatten_dq(dq)
    dq_stage._reinterpret(gl.float32, [line.shape[0]], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(line)
    fence_async_shared()
    add_to_global(dq_desc, [block, 0, 0], dq_stage)


@gluon.jit
def find_masked_rows(program_n, T, S, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return (first row that sees the program's keys, end of the blocks that may be partly hidden, end of all rows)."""
    first_block, last_block = find_row_blocks(program_n, T, BLOCK_M, CAUSAL)
    begin, end = first_block * BLOCK_M, last_block * BLOCK_M
    masked_end = begin
    if CAUSAL:
        masked_end = min(program_n + ROWS * CONSUMERS, end)
    if program_n + ROWS * CONSUMERS > S:
        masked_end = end
    return begin, masked_end, end


@gluon.jit
def _start_dq(k_shared, ds_shared, consumer, buffer, CONSUMERS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr):
    """Start a warpgroup's half of a block's dQ: for 64 rows half of the columns, for 128 half of the rows."""
    WIDTH: gl.constexpr = BLOCK_M * D // (CONSUMERS * ROWS)
    SHARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dq = gl.zeros((ROWS, WIDTH), gl.float32, SHARE)
    for other in gl.static_range(CONSUMERS):
        k_columns, ds_rows = as_matrix(k_shared.index(other)), ds_shared.index(buffer * CONSUMERS + other)
        if WIDTH < D:
            k_columns = k_columns.slice(consumer * WIDTH, WIDTH, dim=1)
        if BLOCK_M > ROWS:
            ds_rows = ds_rows.slice(consumer * ROWS, ROWS, dim=1)
        dq = warpgroup_mma(ds_rows.permute((1, 0)), k_columns, dq, use_acc=other > 0, is_async=True)
    return dq


@gluon.jit
def add_dq_and_dk(
    dk, dv, ds, q, k_shared, ds_shared, consumer, start_m, ds_ready, buffer, parity, dq_columns, CONSUMERS: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Return dk with dS's share, and dv, whose product ends here; add all warpgroups' share to dQ."""
    D: gl.constexpr = OUT.instr_shape[1]
    # Two buffers: when a buffer is written again, the others have finished with the block before last.
    ds_shared.index(buffer * CONSUMERS + consumer).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_ready.index(buffer), count=1)
    mbarrier.wait(ds_ready.index(buffer), parity)
    dq = _start_dq(k_shared, ds_shared, consumer, buffer, CONSUMERS, D, ds.shape[1])
    dk = warpgroup_mma(as_operand(ds, OUT), q, dk, is_async=True)
    dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
    add_dq(dq_columns, start_m, dq, D)
    # If it were still running when the next block's scores begin, ptxas would serialise all products (C7512).
    dk = warpgroup_mma_wait(0, deps=(dk,))
    return dk, dv


@gluon.jit
def store_dk_and_dv(dk, dv, descs, shared, consumer, b, kv, program_n, keys_free, parity, held_empty, scale):
    """Store dk and dv by TMA through the shared memory of keys and values; scale: of the scores."""
    dk_desc, dv_desc = descs
    k_shared, v_shared = shared
    as_matrix(v_shared.index(consumer)).store(round_to(dv, dv_desc.dtype))
    mbarrier.arrive(keys_free, count=1)
    mbarrier.wait(keys_free, parity)  # the other warpgroup's dQ reads these keys, too
    as_matrix(k_shared.index(consumer)).store(round_to(dk * (scale * LN_2), dk_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, [b, kv, program_n + consumer * ROWS, 0], k_shared.index(consumer))
    tma.async_copy_shared_to_global(dv_desc, [b, kv, program_n + consumer * ROWS, 0], v_shared.index(consumer))
    tma.store_wait(0)
    mbarrier.arrive(held_empty.index(consumer), count=1)


@gluon.jit
def _start_product(held, consumer, rows, SCORES: gl.constexpr):
    """Start the product of a warpgroup's keys, or values, and rows."""
    BLOCK_M: gl.constexpr = SCORES.instr_shape[1]
    zeros = gl.zeros((ROWS, BLOCK_M), gl.float32, SCORES)
    return warpgroup_mma(as_matrix(held.index(consumer)), rows.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _make_ds(
    dv, qk, dp, do, info, start_n, start_m, S, scale, EDGE: gl.constexpr, CAUSAL: gl.constexpr, SCORES: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Return dv with a block's share started, and ds; qk: scores, dp: running. EDGE: the block may be partly hidden."""
    BLOCK_M: gl.constexpr = SCORES.instr_shape[1]
    lse_and_delta = info._reinterpret(gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if EDGE:
        qk = mask_scores_in_eights(qk, start_n, start_m, S, CAUSAL)
    lse_2 = lse_and_delta.index(0).load(gl.SliceLayout(0, SCORES))
    p = exp2(qk * scale - lse_2[None, :])
    p_low = round_to(p, do.dtype)
    dv = warpgroup_mma(as_operand(p_low, OUT), do, dv, is_async=True)
    p = widen(p_low)  # dV's product keeps these registers anyway
    delta = lse_and_delta.index(1).load(gl.SliceLayout(0, SCORES))
    dp = warpgroup_mma_wait(1, deps=(dp,))
    return dv, round_to(p * (dp - delta[None, :]), do.dtype)


@gluon.jit
def _add_gradients(
    dk, dv, shared, consumer, program_n, S, arrived, start_m, ds_ready, buffer, parity, dq_columns, scale,
    CONSUMERS: gl.constexpr, EDGE: gl.constexpr, CAUSAL: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Return dk and dv with a block's share; add dq's share to its columns."""
    k_shared, v_shared, ds_shared = shared
    q, do, info = arrived
    qk = _start_product(k_shared, consumer, q, SCORES)
    dp = _start_product(v_shared, consumer, do, SCORES)
    qk = warpgroup_mma_wait(1, deps=(qk,))
    start_n = program_n + consumer * ROWS
    dv, ds = _make_ds(dv, qk, dp, do, info, start_n, start_m, S, scale, EDGE, CAUSAL, SCORES, OUT)
    return add_dq_and_dk(
        dk, dv, ds, q, k_shared, ds_shared, consumer, start_m, ds_ready, buffer, parity, dq_columns, CONSUMERS, OUT
    )


@gluon.jit
def _add_gradients_ahead(
    dk, dv, qk, shared, consumer, program_n, S, arrived, following, start_m, buffer, dq_desc, dq_block, scale,
    CONSUMERS: gl.constexpr, EDGE: gl.constexpr, CAUSAL: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """`_add_gradients` with dQ by TMA, and the next block's scores; qk are this block's scores.

    dS is exchanged after dK's product has begun, and dq leaves during the next scores, so no product waits for either.
    """
    k_shared, v_shared, ds_shared, dq_shared = shared
    q, do, info, free = arrived
    next_q, there, phase, more = following
    BLOCK_M: gl.constexpr = SCORES.instr_shape[1]
    dp = _start_product(v_shared, consumer, do, SCORES)
    start_n = program_n + consumer * ROWS
    dv, ds = _make_ds(dv, qk, dp, do, info, start_n, start_m, S, scale, EDGE, CAUSAL, SCORES, OUT)
    dk = warpgroup_mma(as_operand(ds, OUT), q, dk, is_async=True)
    ds_shared.index(buffer * CONSUMERS + consumer).store(ds)  # double-buffered, as in add_dq_and_dk
    fence_async_shared()
    meet()
    dq = _start_dq(k_shared, ds_shared, consumer, buffer, CONSUMERS, OUT.instr_shape[1], BLOCK_M)
    mbarrier.wait(there, phase, pred=more)
    # If dk were still running when the next scores begin, registers would lack, and ptxas would serialise all (C7512).
    dk, dv = warpgroup_mma_wait(1, deps=(dk, dv))
    mbarrier.arrive(free, count=1, pred=more)
    qk = _start_product(k_shared, consumer, next_q, SCORES)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    add_dq_by_tma(dq_desc, dq_block + start_m // BLOCK_M * CONSUMERS, dq, dq_shared.index(consumer))
    qk = warpgroup_mma_wait(0, deps=(qk,))  # scores may not be running across loop iterations either (C7514)
    return dk, dv, qk


@gluon.jit
def _make_gradients(
    args, consumer, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Process a warpgroup's keys of every tile, and its half of the tile's share of dQ."""
    dk_desc, dv_desc, shared, ds_shared, dq_shared, gates, ds_ready, keys_free, sizes, dq_sum, padded, scale = args
    k_shared, v_shared, q_shared, do_shared, info_shared = shared
    held_full, held_empty, full, empty = gates
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    if CAUSAL:  # keys from T on are seen by no row, also not by padding rows
        S = min(S, T)
    BLOCK_M: gl.constexpr = q_shared.shape[3]
    D: gl.constexpr = q_shared.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage, phase, held_phase, n_step = 0, 0, 0, 0
    for tile_index in range(count_tiles(whole, rest)):
        n_block, pair = pick_tile(tile_index, blocks, pairs, near)
        program_n = n_block * ROWS * CONSUMERS
        b, kv = pair // (H // group), pair % (H // group)
        begin, masked_end, end = find_masked_rows(program_n, T, S, CONSUMERS, CAUSAL, BLOCK_M)
        dk = gl.zeros((ROWS, D), gl.float32, OUT)
        dv = gl.zeros((ROWS, D), gl.float32, OUT)
        for other in gl.static_range(CONSUMERS):
            mbarrier.wait(held_full.index(other), held_phase)
        if AHEAD:
            left = group * ((end - begin) // BLOCK_M)
            mbarrier.wait(full.index(stage), phase)
            qk = _start_product(k_shared, consumer, as_matrix(q_shared.index(stage)), SCORES)
            qk = warpgroup_mma_wait(0, deps=(qk,))
        for h in range(kv * group, kv * group + group):
            if AHEAD:
                dq_at = find_dq_blocks(b * H + h, consumer, padded, CONSUMERS, BLOCK_M)
            else:
                dq_at = find_dq_columns(dq_sum, b * H + h, consumer, padded, CONSUMERS, D, BLOCK_M)
            for MASKED in gl.static_range(1 if EDGE else 0, -1, -1):  # one loop with masks, then one without
                start, stop = masked_end, end
                if MASKED:
                    start, stop = begin, masked_end
                for start_m in range(start, stop, BLOCK_M):
                    q, do = as_matrix(q_shared.index(stage)), as_matrix(do_shared.index(stage))
                    info, free = info_shared.index(stage), empty.index(stage)
                    after, after_phase = next_stage(stage, phase, STAGES)
                    if AHEAD:
                        left -= 1
                        look = stage  # after a tile's last block: unused scores of valid rows
                        if left > 0:
                            look = after
                        following = as_matrix(q_shared.index(look)), full.index(after), after_phase, left > 0
                        dk, dv, qk = _add_gradients_ahead(
                            dk, dv, qk, (k_shared, v_shared, ds_shared, dq_shared), consumer, program_n, S,
                            (q, do, info, free), following, start_m, n_step & 1, dq_sum, dq_at, scale,
                            CONSUMERS, MASKED > 0, CAUSAL, SCORES, OUT,
                        )  # fmt: skip
                    else:
                        mbarrier.wait(full.index(stage), phase)
                        dk, dv = _add_gradients(
                            dk, dv, (k_shared, v_shared, ds_shared), consumer, program_n, S, (q, do, info), start_m,
                            ds_ready, n_step & 1, n_step >> 1 & 1, dq_at, scale,
                            CONSUMERS, MASKED > 0, CAUSAL, SCORES, OUT,
                        )  # fmt: skip
                        mbarrier.arrive(free, count=1)
                    stage, phase = after, after_phase
                    n_step += 1
        if AHEAD:
            last, _phase = previous_stage(stage, phase, STAGES)
            mbarrier.arrive(empty.index(last), count=1)
        store_dk_and_dv(
            dk, dv, (dk_desc, dv_desc), (k_shared, v_shared), consumer, b, kv, program_n, keys_free, tile_index & 1,
            held_empty, scale,
        )  # fmt: skip
        held_phase ^= 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def gluon_attention_backward_fused_kernel(
    k_desc, v_desc, q_desc, last_desc, do_desc, info_desc, dk_desc, dv_desc, dq_sum, padded, scale, T, S, H, group, pairs,
    blocks, near, whole, rest, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of `blocks` tiles of 2 x 64 keys for `pairs` of sequence and key head; add their dQ to dq_sum.

    dq_sum: float32 (sequences, heads, padded rows, D), unscaled; 64 x 64 blocks lie as in _flatten_dq; with AHEAD their
    descriptor. scale includes log2(e). EDGE: a block of rows may be partly hidden, or keys beyond S exist.
    """
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    gl.static_assert(CONSUMERS == 2 and BLOCK_M * q_desc.block_type.shape[3] == 2 * ROWS * ROWS)
    info_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, BLOCK_M], info_desc.layout)
    shared = (
        allocate(k_desc, CONSUMERS), allocate(v_desc, CONSUMERS), allocate(q_desc, STAGES), allocate(do_desc, STAGES),
        info_shared,
    )  # fmt: skip
    ds_shared = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, 64, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dq_shared = ds_shared
    if AHEAD:
        shape: gl.constexpr = dq_sum.block_type.shape
        dq_shared = gl.allocate_shared_memory(gl.float32, [CONSUMERS, shape[0], shape[1], shape[2]], dq_sum.layout)
    gates = (
        make_barriers(CONSUMERS, 1), make_barriers(CONSUMERS, 1),
        make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS),
    )  # fmt: skip
    ds_ready, keys_free = make_barriers(2, CONSUMERS), make_barriers(1, CONSUMERS).index(0)
    fence_async_shared()
    sizes = (T, S, H, group, pairs, blocks, near, whole, rest)
    fetch_args = (k_desc, v_desc, q_desc, last_desc, do_desc, info_desc, shared, gates, sizes)
    args = (dk_desc, dv_desc, shared, ds_shared, dq_shared, gates, ds_ready, keys_free, sizes, dq_sum, padded, scale)
    gl.warp_specialize(
        [
            (_make_gradients, (args, 0, CONSUMERS, STAGES, CAUSAL, EDGE, AHEAD)),
            (_make_gradients, (args, 1, CONSUMERS, STAGES, CAUSAL, EDGE, AHEAD)),
            (fetch_rows, (fetch_args, CONSUMERS, 1, STAGES, CAUSAL)),
        ],
        [4, 1],
        [REGISTERS, FETCHING],
    )
