"""All of the backward pass of Gluon's attention in one kernel: dK and dV of keys that are held, and their share of dQ.

Five products where backward_rows and backward_keys have seven. The price: programs add to dQ, in float32 and in no order,
so the bits differ from run to run. Scores are transposed, as in backward_keys; dS also goes to shared
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
    """qk of keys from start_n on and rows from start_m on, -inf where a row does not see a key.

    In eights of rows: the numbers that differ by thread are then few, and live outside of the loop in few registers.
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
    """dq (64, N) in one line: 8 columns after 8, of each a warp's share, a thread's, and there rows 0 and 8 x columns 0, 1.

    So nothing leaves its thread, which has 4 numbers in a row, and a warp 128. attention_dq_of_sums_kernel reads it.
    """
    in_pairs = gl.reshape(dq, (4, 2, 8, dq.shape[1] // 8, 4, 2))
    return gl.reshape(gl.permute(in_pairs, (3, 0, 2, 4, 1, 5)), (dq.shape[0] * dq.shape[1],))


@gluon.jit
def find_dq_columns(
    dq_sum, head, consumer, padded, CONSUMERS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr = ROWS
):  # fmt: skip
    """Where a warpgroup's share of dQ begins in the sums of a sequence's head."""
    return dq_sum + head.to(gl.int64) * padded * D + consumer * (BLOCK_M * D // CONSUMERS)


@gluon.jit
def add_dq(dq_columns, start_m, dq, D: gl.constexpr):
    line = _flatten_dq(dq)
    gl.atomic_add(dq_columns + start_m * D + gl.arange(0, line.shape[0], line.type.layout), line, sem="relaxed")


@gluon.jit
def find_dq_blocks(head, consumer, padded, BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr):
    """Which block of the sums, of those of 4096 that TMA adds to, is a warpgroup's of a head's first rows."""
    return head * (padded // BLOCK_M * CONSUMERS) + consumer


@gluon.jit
def add_dq_by_tma(dq_desc, block, line, dq_stage, WAIT: gl.constexpr):
    """dq in a line, as of _flatten_dq, added to the sums from a block on, by way of memory that is the warpgroup's own."""
    if WAIT:
        tma.store_wait(0)
    dq_stage._reinterpret(gl.float32, [line.shape[0]], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(line)
    fence_async_shared()
    add_to_global(dq_desc, [block, 0, 0], dq_stage)


@gluon.jit
def _halve(line):
    return gl.split(gl.permute(gl.reshape(line, (2, line.shape[0] // 2)), (1, 0)))


@gluon.jit
def find_masked_rows(program_n, T, S, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr = ROWS):
    """Where the rows begin that see a program's keys, where those end whose blocks may be partly hidden, and all."""
    first_block, last_block = find_row_blocks(program_n, T, BLOCK_M, CAUSAL)
    begin, end = first_block * BLOCK_M, last_block * BLOCK_M
    masked_end = begin
    if CAUSAL:
        masked_end = min(program_n + ROWS * CONSUMERS, end)
    if program_n + ROWS * CONSUMERS > S:
        masked_end = end
    return begin, masked_end, end


@gluon.jit
def _place_ds(buffer, consumer, CONSUMERS: gl.constexpr, ENDS: gl.constexpr):
    """Which block of shared memory; ENDS: a warpgroup's own lie together."""
    if ENDS:
        return consumer * 2 + buffer
    else:
        return buffer * CONSUMERS + consumer


@gluon.jit
def _as_stages(shared, desc, COUNT: gl.constexpr):
    """Memory for COUNT blocks of desc's tensor in what is there."""
    shape: gl.constexpr = desc.block_type.shape
    return shared._reinterpret(desc.dtype, [COUNT, 1, 1, shape[2], shape[3]], desc.layout)


@gluon.jit
def _share_ds(
    ds, ds_shared, consumer, ds_ready, buffer, parity, CONSUMERS: gl.constexpr, NAMED: gl.constexpr, ENDS: gl.constexpr
):  # fmt: skip
    """ds for all warpgroups to read, and theirs there."""
    if ENDS:  # the tile before's dk has left from here, and dq's share of the block before
        tma.store_wait(0)
    # Two buffers: who writes here has seen all of the block before, and by then the others were done with the one before it.
    ds_shared.index(_place_ds(buffer, consumer, CONSUMERS, ENDS)).store(ds)
    fence_async_shared()
    if NAMED:
        meet()
    else:
        mbarrier.arrive(ds_ready.index(buffer), count=1)
        mbarrier.wait(ds_ready.index(buffer), parity)


@gluon.jit
def _start_dq(
    k_shared, ds_shared, consumer, buffer, CONSUMERS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
    ENDS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's half of a block's dQ, under way: of 64 rows half of the columns, of 128 half of the rows."""
    WIDTH: gl.constexpr = BLOCK_M * D // (CONSUMERS * ROWS)
    SHARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dq = gl.zeros((ROWS, WIDTH), gl.float32, SHARE)
    for other in gl.static_range(CONSUMERS):
        k_columns, ds_rows = as_matrix(k_shared.index(other)), ds_shared.index(_place_ds(buffer, other, CONSUMERS, ENDS))
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
    """dk with dS's share; dQ's, of all warpgroups' dS, added to its columns. dv's product, under way, is over then."""
    _share_ds(ds, ds_shared, consumer, ds_ready, buffer, parity, CONSUMERS, False, False)
    dq = _start_dq(k_shared, ds_shared, consumer, buffer, CONSUMERS, OUT.instr_shape[1], ROWS, False)
    dk = warpgroup_mma(as_operand(ds, OUT), q, dk, is_async=True)
    dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
    add_dq(dq_columns, start_m, dq, OUT.instr_shape[1])
    # Were it in flight when the next block's scores begin, the assembler would serialise all products (C7512).
    dk = warpgroup_mma_wait(0, deps=(dk,))
    return dk, dv


@gluon.jit
def store_dk_and_dv(dk, dv, descs, shared, consumer, b, kv, program_n, keys_free, parity, held_empty, scale):
    """dk and dv through the memory of keys and values, by TMA; scale: of the scores."""
    dk_desc, dv_desc = descs
    k_shared, v_shared = shared
    as_matrix(v_shared.index(consumer)).store(round_to(dv, dv_desc.dtype))
    mbarrier.arrive(keys_free, count=1)
    mbarrier.wait(keys_free, parity)  # the others' dQ is of these keys too
    as_matrix(k_shared.index(consumer)).store(round_to(dk * (scale * LN_2), dk_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, [b, kv, program_n + consumer * ROWS, 0], k_shared.index(consumer))
    tma.async_copy_shared_to_global(dv_desc, [b, kv, program_n + consumer * ROWS, 0], v_shared.index(consumer))
    tma.store_wait(0)
    mbarrier.arrive(held_empty.index(consumer), count=1)


@gluon.jit
def _start_scores(k_shared, consumer, q, SCORES: gl.constexpr):
    BLOCK_M: gl.constexpr = SCORES.instr_shape[1]
    zeros = gl.zeros((ROWS, BLOCK_M), gl.float32, SCORES)
    k = as_matrix(k_shared.index(consumer))
    return warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _take_dq(
    dq, sums, start_m, dq_stage, BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, DQ: gl.constexpr,
    ENDS: gl.constexpr,
):  # fmt: skip
    """A block's dq added to its sums."""
    dq_desc, columns, first_block = sums
    if DQ == "tma":
        add_dq_by_tma(dq_desc, first_block + start_m // BLOCK_M * CONSUMERS, _flatten_dq(dq), dq_stage, not ENDS)
    elif DQ == "mix":  # the second half leaves by TMA
        line, by_tma = _halve(_flatten_dq(dq))
        at = columns + start_m * D + gl.arange(0, line.shape[0], line.type.layout)
        gl.atomic_add(at, line, sem="relaxed")
        add_dq_by_tma(dq_desc, (first_block + start_m // BLOCK_M * CONSUMERS) * 2 + 1, by_tma, dq_stage, True)
    elif DQ == "red":
        add_dq(columns, start_m, dq, D)
    elif DQ == "none":
        gl.inline_asm_elementwise(  # it is looked at, lest the assembler leave the product out
            "{ .reg .pred p; .reg .f32 x, y; .reg .b32 a; mov.b32 a, 0; add.f32 x, $4, $5; add.f32 y, $6, $7; add.f32 x, x, y; "
            "setp.eq.f32 p, x, 0f0D2B3C4D; @p st.shared.f32 [a], x; "
            "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }",
            "=f,=f,=f,=f,f,f,f,f", [dq], dtype=gl.float32, is_pure=False, pack=4,
        )  # fmt: skip


@gluon.jit
def _add_gradients(
    dk, dv, qk, shared, consumer, program_n, S, arrived, start_m, ds_ready, buffer, parity, sums, scale, following,
    CONSUMERS: gl.constexpr, EDGE: gl.constexpr, CAUSAL: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
    DQ: gl.constexpr, ORDER: gl.constexpr, EXACT: gl.constexpr, NAMED: gl.constexpr, LATE: gl.constexpr, WIDEN: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """dk and dv with a block's share, dq's added to its sums. EDGE: the block may be partly hidden.

    qk: its scores, if ORDER is 2; what is returned has those of the block that is following.
    """
    k_shared, v_shared, ds_shared, dq_shared = shared
    q, do, info, free, before, begun = arrived
    BLOCK_M: gl.constexpr = SCORES.instr_shape[1]
    D: gl.constexpr = OUT.instr_shape[1]
    zeros = gl.zeros((ROWS, BLOCK_M), gl.float32, SCORES)
    lse_and_delta = info._reinterpret(gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if ORDER < 2:
        qk = _start_scores(k_shared, consumer, q, SCORES)
    v = as_matrix(v_shared.index(consumer))
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if ORDER < 2:
        if LATE:
            mbarrier.arrive(before, count=1, pred=begun)
        qk = warpgroup_mma_wait(1, deps=(qk,))
    if EDGE:
        qk = mask_scores_in_eights(qk, program_n + consumer * ROWS, start_m, S, CAUSAL)
    lse_2 = lse_and_delta.index(0).load(gl.SliceLayout(0, SCORES))
    p = exp2(qk * scale - lse_2[None, :])
    p_low = round_to(p, q.dtype)
    dv = warpgroup_mma(as_operand(p_low, OUT), do, dv, is_async=True)
    if not EXACT:
        p = widen(p_low) if WIDEN else p_low.to(gl.float32)  # dV's product keeps these registers in any case
    delta = lse_and_delta.index(1).load(gl.SliceLayout(0, SCORES))
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = round_to(p * (dp - delta[None, :]), q.dtype)
    if ORDER > 0:
        dk = warpgroup_mma(as_operand(ds, OUT), q, dk, is_async=True)
    if DQ != "off":
        _share_ds(ds, ds_shared, consumer, ds_ready, buffer, parity, CONSUMERS, NAMED, ENDS)
        dq = _start_dq(k_shared, ds_shared, consumer, buffer, CONSUMERS, D, BLOCK_M, ENDS)
    else:
        dq = zeros
    if ORDER == 0:
        dk = warpgroup_mma(as_operand(ds, OUT), q, dk, is_async=True)
        dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
        _take_dq(dq, sums, start_m, dq_shared.index(consumer), BLOCK_M, CONSUMERS, D, DQ, ENDS)
        if LATE:
            next_q, there, phase, more = following
            mbarrier.wait(there, phase, pred=more)
        # Were it in flight when the next block's scores begin, the assembler would serialise all products (C7512).
        dk = warpgroup_mma_wait(0, deps=(dk,))
        if not LATE:
            mbarrier.arrive(free, count=1)
    elif ORDER == 1:
        dq, dk, dv = warpgroup_mma_wait(0, deps=(dq, dk, dv))
        mbarrier.arrive(free, count=1)
        _take_dq(dq, sums, start_m, dq_shared.index(consumer), BLOCK_M, CONSUMERS, D, DQ, ENDS)
    else:
        next_q, there, phase, more = following
        mbarrier.wait(there, phase, pred=more)
        dk, dv = warpgroup_mma_wait(1, deps=(dk, dv))
        mbarrier.arrive(free, count=1, pred=more)
        qk = _start_scores(k_shared, consumer, next_q, SCORES)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        _take_dq(dq, sums, start_m, dq_shared.index(consumer), BLOCK_M, CONSUMERS, D, DQ, ENDS)
        qk = warpgroup_mma_wait(0, deps=(qk,))  # in flight over the loop's end, the assembler would serialise all (C7514)
    if ORDER == 2:
        return dk, dv, qk
    else:
        return dk, dv, 0


@gluon.jit
def _make_gradients(
    args, consumer, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
    DQ: gl.constexpr, ORDER: gl.constexpr, EXACT: gl.constexpr, NAMED: gl.constexpr, LATE: gl.constexpr, WIDEN: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's keys of every tile, and its columns of the tile's share of dQ."""
    dk_desc, dv_desc, shared, ds_shared, dq_shared, gates, ds_ready, keys_free, sizes, dq_sum, dq_desc, padded, scale = args
    k_shared, v_shared, q_shared, do_shared, info_shared = shared
    held_full, held_empty, full, empty = gates
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    if CAUSAL:  # keys from T on, no row sees: nor may one beyond T
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
        qk, left = 0, 0
        if ORDER == 2 or LATE:
            left = group * ((end - begin) // BLOCK_M)
            mbarrier.wait(full.index(stage), phase)
        if ORDER == 2:
            qk = _start_scores(k_shared, consumer, as_matrix(q_shared.index(stage)), SCORES)
            qk = warpgroup_mma_wait(0, deps=(qk,))
        for h in range(kv * group, kv * group + group):
            sums = (
                dq_desc,
                find_dq_columns(dq_sum, b * H + h, consumer, padded, CONSUMERS, D, BLOCK_M),
                find_dq_blocks(b * H + h, consumer, padded, BLOCK_M, CONSUMERS),
            )
            for MASKED in gl.static_range(1 if EDGE else 0, -1, -1):  # a loop that masks, then one that needs not ask
                start, stop = masked_end, end
                if MASKED:
                    start, stop = begin, masked_end
                for start_m in range(start, stop, BLOCK_M):
                    after, after_phase = next_stage(stage, phase, STAGES)
                    following = 0
                    if ORDER == 2 or LATE:
                        left -= 1
                        look = stage  # after a tile's last block scores that nobody takes, of rows that are there
                        if left > 0:
                            look = after
                        following = as_matrix(q_shared.index(look)), full.index(after), after_phase, left > 0
                    if ORDER < 2 and not LATE:
                        mbarrier.wait(full.index(stage), phase)
                    arrived = (
                        as_matrix(q_shared.index(stage)),
                        as_matrix(do_shared.index(stage)),
                        info_shared.index(stage),
                        empty.index(stage),
                        empty.index((stage + STAGES - 1) % STAGES),
                        n_step > 0,
                    )
                    dk, dv, qk = _add_gradients(
                        dk, dv, qk, (k_shared, v_shared, ds_shared, dq_shared), consumer, program_n, S, arrived, start_m,
                        ds_ready, n_step & 1, n_step >> 1 & 1, sums, scale, following,
                        CONSUMERS, MASKED > 0, CAUSAL, SCORES, OUT, DQ, ORDER, EXACT, NAMED, LATE, WIDEN, ENDS,
                    )  # fmt: skip
                    stage, phase = after, after_phase
                    n_step += 1
        if ORDER == 2:
            last, _phase = previous_stage(stage, phase, STAGES)
            mbarrier.arrive(empty.index(last), count=1)
        if ENDS:
            mbarrier.arrive(keys_free, count=1)
            mbarrier.wait(keys_free, tile_index & 1)  # the others' dQ is of these keys, and this dS, too
            mbarrier.arrive(held_empty.index(consumer), count=1)
            dk_shared, dv_shared = _as_stages(ds_shared, dk_desc, CONSUMERS), _as_stages(dq_shared, dv_desc, CONSUMERS)
            dk_stage, dv_stage = dk_shared.index(consumer), dv_shared.index(consumer)
            tma.store_wait(0)
            as_matrix(dv_stage).store(round_to(dv, dv_desc.dtype))
            as_matrix(dk_stage).store(round_to(dk * (scale * LN_2), dk_desc.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(dv_desc, [b, kv, program_n + consumer * ROWS, 0], dv_stage)
            tma.async_copy_shared_to_global(dk_desc, [b, kv, program_n + consumer * ROWS, 0], dk_stage)
        else:
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
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr, DQ: gl.constexpr = "red", ORDER: gl.constexpr = 0,
    EXACT: gl.constexpr = False, NAMED: gl.constexpr = False, LATE: gl.constexpr = False, WIDEN: gl.constexpr = False, ENDS: gl.constexpr = False, dq_desc=None,
):  # fmt: skip
    """dK and dV of `blocks` tiles of 2 x 64 keys of `pairs` sequences and heads of keys; their share of dQ in dq_sum.

    dq_sum: float32 (sequences, heads, padded rows, 128), not scaled; 64 rows' halves of columns as in _flatten_dq.
    scale times log2(e). EDGE: a block of rows may be partly hidden, or keys beyond S are there.
    """
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    gl.static_assert(CONSUMERS == 2 and BLOCK_M * q_desc.block_type.shape[3] == 8192)
    info_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, BLOCK_M], info_desc.layout)
    shared = (
        allocate(k_desc, CONSUMERS), allocate(v_desc, CONSUMERS), allocate(q_desc, STAGES), allocate(do_desc, STAGES),
        info_shared,
    )  # fmt: skip
    ds_shared = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, 64, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dq_shared = ds_shared
    if DQ == "tma":
        dq_shared = gl.allocate_shared_memory(gl.float32, [CONSUMERS, 1, 16, 256], dq_desc.layout)
    if DQ == "mix":
        dq_shared = gl.allocate_shared_memory(gl.float32, [CONSUMERS, 1, 8, 256], dq_desc.layout)
    gates = (
        make_barriers(CONSUMERS, 1), make_barriers(CONSUMERS, 1),
        make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS),
    )  # fmt: skip
    ds_ready, keys_free = make_barriers(2, CONSUMERS), make_barriers(1, CONSUMERS).index(0)
    fence_async_shared()
    sizes = (T, S, H, group, pairs, blocks, near, whole, rest)
    fetch_args = (k_desc, v_desc, q_desc, last_desc, do_desc, info_desc, shared, gates, sizes)
    args = (
        dk_desc, dv_desc, shared, ds_shared, dq_shared, gates, ds_ready, keys_free, sizes, dq_sum, dq_desc, padded, scale,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_make_gradients, (args, 0, CONSUMERS, STAGES, CAUSAL, EDGE, DQ, ORDER, EXACT, NAMED, LATE, WIDEN, ENDS)),
            (_make_gradients, (args, 1, CONSUMERS, STAGES, CAUSAL, EDGE, DQ, ORDER, EXACT, NAMED, LATE, WIDEN, ENDS)),
            (fetch_rows, (fetch_args, CONSUMERS, 1, STAGES, CAUSAL)),
        ],
        [4, 1],
        [REGISTERS, FETCHING],
    )
