"""The forward kernel of FP8 attention for Hopper, in Gluon: `forward`'s tiles with both products in E4M3.

Three warpgroups share each block of keys and values, fetched by TMA: blocks for only 64 rows would exceed the L2's
bandwidth. One warpgroup's softmax runs during another's products, not during its own, for lack of registers. Values
come transposed by blocks of 128 keys in the order of `fp8_quantize.order_slots`, so that P is the left operand of an
FP8 product without moving between threads. Each block's product is accumulated separately and added in float32, because
the tensor core accumulates FP8 with 14 bits; by halves of the features, to save registers.
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

from te_bench.kernels.attention.fp8_quantize import PADDED
from te_bench.kernels.attention.hopper.forward import fetch_tiles
from te_bench.kernels.attention.hopper.parts import (
    LN_2,
    LOWEST,
    ROWS,
    SIZES,
    UNALIGNED,
    allocate,
    as_matrix,
    count_key_blocks,
    count_tiles,
    exp2,
    keep_positive,
    make_barriers,
    mask_scores,
    next_stage,
    pick_tile,
    round_to,
    spread_rows,
    sum_in_parts,
)

BLOCK = gl.constexpr(PADDED)
OFFSET = gl.constexpr(8.0)  # P is rounded as 2^8 P: manual_fp8.WEIGHTS
SWIZZLE = gl.constexpr(32)  # bytes of a line of out in shared memory; with 128 a thread needs four addresses


@gluon.jit
def _as_lines(block):
    """Return a block (1, 1, rows, D) of out as a matrix."""
    shape: gl.constexpr = block.shape
    return block._reinterpret(block.dtype, [shape[2], shape[3]], gl.NVMMASharedLayout(SWIZZLE, 16, 2))


@gluon.jit
def _quantize_p(p, OUT: gl.constexpr):
    """Return the weights in E4M3 as left operand of a product into OUT, keys in slots, all within their threads."""
    ROWS_HERE: gl.constexpr = p.shape[0]
    BLOCK_N: gl.constexpr = p.shape[1]
    in_pairs = gl.permute(gl.reshape(p, (ROWS_HERE, BLOCK_N // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    in_slots = gl.reshape(in_pairs, (ROWS_HERE, BLOCK_N))
    in_place = gl.convert_layout(in_slots, gl.DotOperandLayout(0, OUT, 4), assert_trivial=True)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [in_place], dtype=gl.uint8, is_pure=True, pack=4,
    ).to(gl.float8e4nv, bitcast=True)  # fmt: skip


@gluon.jit
def _sum_own_columns(x):
    """Return the sum of a thread's own columns in each row."""
    even, odd = gl.split(gl.reshape(sum_in_parts(x), (x.shape[0], 4, 2)))
    return even + odd


@gluon.jit
def _update_softmax(qk, scale, l_i, m_i):
    """Return p = 2^(8 + scale qk - m_i), l_i and m_i including earlier blocks, and alpha, as in `forward`."""
    m_new = gl.maximum(m_i, gl.max(qk, 1) * scale)
    p = exp2(qk * scale - (m_new - OFFSET)[:, None])
    alpha = exp2(m_i - m_new)
    return p, l_i * spread_rows(alpha, l_i) + _sum_own_columns(p), m_new, alpha


@gluon.jit
def _store_out(acc_low, acc_high, l_i, m_i, out_desc, stage, lse, v_inv, b, h, pair, start_m, T):
    """Store out by TMA, which drops rows beyond T, once the previous tile has left its memory; and store lse."""
    denominator = gl.sum(l_i, 1)
    lse_2 = m_i - OFFSET + gl.convert_layout(gl.log2(denominator), m_i.type.layout, assert_trivial=True)
    offs_m = start_m + gl.arange(0, m_i.shape[0], m_i.type.layout)
    gl.store(lse + pair.to(gl.int64) * T + offs_m, lse_2 * LN_2, offs_m < T)
    factor = gl.load(v_inv) / denominator
    tma.store_wait(0)
    HALF: gl.constexpr = acc_low.shape[1]
    out_shared = _as_lines(stage)
    out_shared.slice(0, HALF, 1).store(round_to(acc_low * spread_rows(factor, acc_low), out_desc.dtype))
    out_shared.slice(HALF, HALF, 1).store(round_to(acc_high * spread_rows(factor, acc_high), out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [b, h, start_m, 0], stage)


@gluon.jit
def _skip_blocks(gates, count, stage, phase, STAGES: gl.constexpr):
    """Release the next `count` blocks, which only other warpgroups see."""
    _, _, k_full, k_empty, v_full, v_empty = gates
    for _i in range(count):
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _add_half(acc, p_operand, v_stage, half_zeros, alpha, WHICH: gl.constexpr):
    """Return alpha acc plus the product of p and one half of the transposed values' features."""
    HALF: gl.constexpr = half_zeros.shape[1]
    half = as_matrix(v_stage).slice(WHICH * HALF, HALF, 0)
    part = warpgroup_mma(p_operand, half.permute((1, 0)), half_zeros, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=(part,))
    return acc * spread_rows(alpha, acc) + part


@gluon.jit
def _attend_block(
    acc_low, acc_high, l_i, m_i, q, zeros, half_zeros, shared, gates, scale, stage, phase, start_m, start_n, S,
    CAUSAL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """Process one more block: qk, p and its product with the values, in sequence. EDGE: it may be partly hidden."""
    _, k_shared, v_shared, _ = shared
    _, _, k_full, k_empty, v_full, v_empty = gates
    OUT: gl.constexpr = half_zeros.type.layout  # Triton 3.6 treats a layout as constant only if it has a name
    mbarrier.wait(k_full.index(stage), phase)
    k = as_matrix(k_shared.index(stage)).permute((1, 0))
    qk = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    qk = warpgroup_mma_wait(0, deps=(qk,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if EDGE:
        qk = mask_scores(qk, start_m, start_n, S, CAUSAL)
    p, l_i, m_i, alpha = _update_softmax(qk, scale, l_i, m_i)
    p_operand = _quantize_p(p, OUT)
    mbarrier.wait(v_full.index(stage), phase)
    acc_low = _add_half(acc_low, p_operand, v_shared.index(stage), half_zeros, alpha, 0)
    acc_high = _add_half(acc_high, p_operand, v_shared.index(stage), half_zeros, alpha, 1)
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc_low, acc_high, l_i, m_i


@gluon.jit
def _attend(
    args, consumer, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    """Process a warpgroup's rows of every tile."""
    out_desc, shared, gates, sizes, lse, scales, scale = args
    q_shared, k_shared, _, out_shared = shared
    q_full, q_empty, _, _, _, _ = gates
    q_inv, k_inv, v_inv = scales
    T, S, H, group, pairs, blocks, near, whole, rest = sizes
    BLOCK_N: gl.constexpr = k_shared.shape[3]
    HALF: gl.constexpr = q_shared.shape[4] // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES)
    half_zeros = gl.zeros((ROWS, HALF), gl.float32, OUT)
    stage, phase, slot, slot_phase = 0, 0, 0, 0
    for tile_index in range(count_tiles(whole, rest)):
        m_block, pair = pick_tile(tile_index, blocks, pairs, near)
        program_m = (blocks - 1 - m_block) * ROWS * CONSUMERS
        start_m = program_m + consumer * ROWS
        b, h = pair // H, pair % H
        kv = b * (H // group) + h // group
        qk_scale = keep_positive(scale * gl.load(q_inv + pair) * gl.load(k_inv + kv))
        count = count_key_blocks(start_m, 1, T, S, BLOCK_N, CAUSAL)
        skipped = count_key_blocks(program_m, CONSUMERS, T, S, BLOCK_N, CAUSAL) - count
        stage, phase = _skip_blocks(gates, skipped, stage, phase, STAGES)
        buffer = consumer * SLOTS + slot
        q = as_matrix(q_shared.index(buffer))
        mbarrier.wait(q_full.index(buffer), slot_phase)
        # Begin with zeros instead of the first block's product: ptxas would otherwise merge both and keep P in memory.
        acc_low, acc_high, l_i = half_zeros, half_zeros, _sum_own_columns(zeros)
        m_i = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        if EDGE:
            count -= 1
            acc_low, acc_high, l_i, m_i = _attend_block(
                acc_low, acc_high, l_i, m_i, q, zeros, half_zeros, shared, gates, qk_scale, stage, phase, start_m,
                count * BLOCK_N, S, CAUSAL, True,
            )  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)
        for _i in range(count):
            acc_low, acc_high, l_i, m_i = _attend_block(
                acc_low, acc_high, l_i, m_i, q, zeros, half_zeros, shared, gates, qk_scale, stage, phase, start_m, 0, S,
                CAUSAL, False,
            )  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.arrive(q_empty.index(buffer), count=1)
        out_stage = out_shared.index(consumer)
        _store_out(acc_low, acc_high, l_i, m_i, out_desc, out_stage, lse, v_inv + kv, b, h, pair, start_m, T)
        slot, slot_phase = next_stage(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def fp8_attention_forward_gluon_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, q_inv, k_inv, v_inv, scale, T, S, H, group, pairs, blocks, near,
    whole, rest, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    FETCHING: gl.constexpr, CAUSAL: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """Compute out and lse of `blocks` tiles of CONSUMERS x 64 rows for `pairs` of sequence and head.

    scale includes log2(e). SLOTS: tiles whose rows are in shared memory at once; STAGES: blocks of keys and of values.
    REGISTERS, FETCHING: per multiplying and fetching thread. EDGE: a block of keys may be partly hidden.
    """
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
    fence_async_shared()
    shared = (q_shared, k_shared, v_shared, allocate(out_desc, CONSUMERS))
    sizes = (T, S, H, group, pairs, blocks, near, whole, rest)
    fetch_args = (q_desc, k_desc, v_desc, (q_shared, k_shared, v_shared), gates, sizes)
    args = (out_desc, shared, gates, sizes, lse, (q_inv, k_inv, v_inv), scale)
    gl.static_assert(CONSUMERS == 3)
    gl.warp_specialize(
        [
            (_attend, (args, 0, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
            (_attend, (args, 1, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
            (_attend, (args, 2, CONSUMERS, SLOTS, STAGES, CAUSAL, EDGE)),
            (fetch_tiles, (fetch_args, CONSUMERS, SLOTS, STAGES, CAUSAL, BLOCK)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, FETCHING],
    )
