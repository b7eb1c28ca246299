"""The forward kernel of Gluon's attention: one warp fetches; warpgroups of 64 rows multiply and apply softmax.

It goes from the last block of keys to the first, so that the one partly hidden block comes before the loop, which masks
nothing. OVERLAP: a block's exponentials run during the product of the previous weights and values. Warpgroups take
turns on the tensor core, so that one's exponentials run during another's products. Source of both: Shah et al.,
"FlashAttention-3", arXiv:2407.08608, written anew.
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
    allocate,
    as_matrix,
    as_operand,
    count_key_blocks,
    count_tiles,
    exp2,
    fetch,
    hold_back,
    make_barriers,
    mask_scores,
    next_stage,
    pass_turn,
    pick_tile,
    previous_stage,
    round_to,
    spread_rows,
    sum_in_parts,
    take_turn,
)


@gluon.jit
def fetch_tiles(
    fetch_args, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    VALUES: gl.constexpr,
):  # fmt: skip
    """Fetch, per tile, each warpgroup's rows, and the keys and values from the last block on.

    VALUES: keys per block of the transposed values; 0 if values lie as keys do.
    """
    q_desc, k_desc, v_desc, shared, gates, sizes = fetch_args
    q_shared, k_shared, v_shared = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty = gates
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    stage, phase, slot, slot_phase = 0, 0, 0, 0
    for tile_index in range(count_tiles(whole, rest)):
        m_block, pair = pick_tile(tile_index, blocks, pairs, near)
        program_m = (blocks - 1 - m_block) * ROWS * CONSUMERS
        b, h = pair // H, pair % H
        for consumer in gl.static_range(CONSUMERS):
            buffer = consumer * SLOTS + slot
            start_m, full, empty = program_m + consumer * ROWS, q_full.index(buffer), q_empty.index(buffer)
            fetch(q_desc, b, h, start_m, full, empty, slot_phase, q_shared.index(buffer))
        slot, slot_phase = next_stage(slot, slot_phase, SLOTS)
        count = count_key_blocks(program_m, CONSUMERS, T, S, BLOCK_N, CAUSAL)
        for i in range(count):
            start_n, kv = (count - 1 - i) * BLOCK_N, h // group
            fetch(k_desc, b, kv, start_n, k_full.index(stage), k_empty.index(stage), phase, k_shared.index(stage))
            row, column = start_n, 0
            if VALUES:
                row, column = start_n // VALUES * v_desc.block_type.shape[2], start_n % VALUES
            fetch(v_desc, b, kv, row, v_full.index(stage), v_empty.index(stage), phase, v_shared.index(stage), column)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _start_softmax(qk, scale):
    """Return p = 2^(scale qk - m_i), l_i, the rows' partial sums, and m_i, the rows' maxima.

    m_i is finite: a row that sees only -inf in this block gets weights of 0, not infinity minus infinity.
    """
    m_i = gl.maximum(gl.max(qk, 1) * scale, LOWEST)
    p = exp2(qk * scale - m_i[:, None])
    return p, sum_in_parts(p), m_i


@gluon.jit
def _update_softmax(qk, scale, l_i, m_i):
    """Return p, l_i and m_i including the earlier blocks, and alpha, the factor of their sums."""
    m_new = gl.maximum(m_i, gl.max(qk, 1) * scale)
    p = exp2(qk * scale - m_new[:, None])
    alpha = exp2(m_i - m_new)
    return p, l_i * spread_rows(alpha, l_i) + sum_in_parts(p), m_new, alpha


@gluon.jit
def _store_out(acc, l_i, m_i, out_desc, stage, lse, b, h, pair, start_m, T):
    """Store out by TMA, which drops rows beyond T, through q's shared memory; and store lse."""
    denominator = gl.sum(l_i, 1)
    # A row whose scores are all -inf becomes NaN, as in softmax.
    denominator = gl.where(denominator == 0.0, float("nan"), denominator)
    lse_2 = m_i + gl.convert_layout(gl.log2(denominator), m_i.type.layout, assert_trivial=True)
    offs_m = start_m + gl.arange(0, m_i.shape[0], m_i.type.layout)
    gl.store(lse + pair.to(gl.int64) * T + offs_m, lse_2 * LN_2, offs_m < T)
    as_matrix(stage).store(round_to(acc * spread_rows(1.0 / denominator, acc), out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [b, h, start_m, 0], stage)


@gluon.jit
def _skip_blocks(gates, turns, count, consumer, stage, phase, parity, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Release the next `count` blocks, which only other warpgroups see."""
    _, _, k_full, k_empty, v_full, v_empty = gates
    for _i in range(count):
        take_turn(turns, consumer, parity)
        pass_turn(turns, consumer, CONSUMERS)
        parity ^= 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase, parity


@gluon.jit
def _multiply_qk(q, k, zeros):
    return warpgroup_mma(q, as_matrix(k).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _attend_block(
    acc, p, l_i, m_i, q, zeros, shared, gates, turns, scale, consumer, stage, phase, parity,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Add p times its values to acc, and compute p, l_i and m_i of the next block of keys."""
    _, k_shared, v_shared = shared
    _, _, k_full, k_empty, v_full, v_empty = gates
    previous, previous_phase = previous_stage(stage, phase, STAGES)
    # Rounding earlier would overwrite registers that the previous product still reads.
    OUT: gl.constexpr = acc.type.layout
    p_operand = as_operand(round_to(p, k_shared.dtype), OUT)
    mbarrier.wait(k_full.index(stage), phase)
    take_turn(turns, consumer, parity)
    qk = _multiply_qk(q, k_shared.index(stage), zeros)
    mbarrier.wait(v_full.index(previous), previous_phase)
    acc = warpgroup_mma(p_operand, as_matrix(v_shared.index(previous)), acc, is_async=True)
    pass_turn(turns, consumer, CONSUMERS)
    if OVERLAP:
        qk = warpgroup_mma_wait(1, deps=(qk,))
    else:
        qk, acc = warpgroup_mma_wait(0, deps=(qk, acc))
        mbarrier.arrive(v_empty.index(previous), count=1)
    mbarrier.arrive(k_empty.index(stage), count=1)
    p, l_i, m_i, alpha = _update_softmax(qk, scale, l_i, m_i)
    if OVERLAP:
        l_i = hold_back(l_i)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(previous), count=1)
    return acc * spread_rows(alpha, acc), p, l_i, m_i


@gluon.jit
def _attend(
    args, consumer, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EDGE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Process a warpgroup's rows of every tile."""
    out_desc, shared, gates, turns, sizes, lse, scale = args
    q_shared, k_shared, v_shared = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty = gates
    T, S, H, _, pairs, blocks, near, whole, rest = sizes
    BLOCK_N: gl.constexpr = k_shared.shape[3]
    D: gl.constexpr = q_shared.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES)
    stage, phase, slot, slot_phase, parity = 0, 0, 0, 0, 0
    for tile_index in range(count_tiles(whole, rest)):
        m_block, pair = pick_tile(tile_index, blocks, pairs, near)
        program_m = (blocks - 1 - m_block) * ROWS * CONSUMERS
        start_m = program_m + consumer * ROWS
        b, h = pair // H, pair % H
        count = count_key_blocks(start_m, 1, T, S, BLOCK_N, CAUSAL)
        skipped = count_key_blocks(program_m, CONSUMERS, T, S, BLOCK_N, CAUSAL) - count
        stage, phase, parity = _skip_blocks(gates, turns, skipped, consumer, stage, phase, parity, CONSUMERS, STAGES)
        buffer = consumer * SLOTS + slot
        q = as_matrix(q_shared.index(buffer))
        mbarrier.wait(q_full.index(buffer), slot_phase)
        mbarrier.wait(k_full.index(stage), phase)
        take_turn(turns, consumer, parity)
        qk = _multiply_qk(q, k_shared.index(stage), zeros)
        pass_turn(turns, consumer, CONSUMERS)
        parity ^= 1
        tma.store_wait(0)  # the previous tile's out has left its slot
        mbarrier.arrive(q_empty.index(consumer * SLOTS + (slot + SLOTS - 1) % SLOTS), count=1, pred=tile_index > 0)
        qk = warpgroup_mma_wait(0, deps=(qk,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        if EDGE:
            qk = mask_scores(qk, start_m, (count - 1) * BLOCK_N, S, CAUSAL)
        p, l_i, m_i = _start_softmax(qk, scale)
        acc = gl.zeros((ROWS, D), gl.float32, OUT)
        stage, phase = next_stage(stage, phase, STAGES)
        for _i in range(count - 1):
            acc, p, l_i, m_i = _attend_block(
                acc, p, l_i, m_i, q, zeros, shared, gates, turns, scale, consumer, stage, phase, parity,
                CONSUMERS, STAGES, OVERLAP,
            )  # fmt: skip
            parity ^= 1
            stage, phase = next_stage(stage, phase, STAGES)
        p_operand = as_operand(round_to(p, q_shared.dtype), OUT)
        previous, previous_phase = previous_stage(stage, phase, STAGES)
        mbarrier.wait(v_full.index(previous), previous_phase)
        acc = warpgroup_mma(p_operand, as_matrix(v_shared.index(previous)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(previous), count=1)
        _store_out(acc, l_i, m_i, out_desc, q_shared.index(buffer), lse, b, h, pair, start_m, T)
        slot, slot_phase = next_stage(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def gluon_attention_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, scale, T, S, H, group, pairs, blocks, near,
    whole, rest, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Compute out and lse of `blocks` tiles of CONSUMERS x 64 rows for `pairs` of sequence and head.

    scale includes log2(e). SLOTS: tiles whose rows are in shared memory at once; STAGES: blocks of keys and of values.
    REGISTERS, FETCHING: per multiplying and fetching thread. EDGE: a block of keys may be partly hidden.
    """
    gl.static_assert(k_desc.block_type.shape[2] % ROWS == 0, "one block of keys is partly hidden, not two")
    q_shared, k_shared, v_shared = (
        allocate(q_desc, CONSUMERS * SLOTS),
        allocate(k_desc, STAGES),
        allocate(v_desc, STAGES),
    )
    gates = (
        make_barriers(CONSUMERS * SLOTS, 1), make_barriers(CONSUMERS * SLOTS, 1),
        make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS),
        make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS),
    )  # fmt: skip
    turns = make_barriers(CONSUMERS, 1)
    fence_async_shared()
    shared, sizes = (q_shared, k_shared, v_shared), (T, S, H, group, pairs, blocks, near, whole, rest)
    fetch_args = (q_desc, k_desc, v_desc, shared, gates, sizes)
    args = (out_desc, shared, gates, turns, sizes, lse, scale)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (args, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP)),
                (_attend, (args, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP)),
                (fetch_tiles, (fetch_args, CONSUMERS, SLOTS, STAGES, CAUSAL, 0)),
            ],
            [4, 1],
            [REGISTERS, FETCHING],
        )
    else:
        gl.static_assert(CONSUMERS == 4)
        gl.warp_specialize(
            [
                (_attend, (args, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP)),
                (_attend, (args, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP)),
                (_attend, (args, 2, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP)),
                (_attend, (args, 3, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE, OVERLAP)),
                (fetch_tiles, (fetch_args, CONSUMERS, SLOTS, STAGES, CAUSAL, 0)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, FETCHING],
        )
