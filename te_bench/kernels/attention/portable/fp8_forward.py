# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The forward kernel of FP8 attention, and its launcher: `forward`'s order with both products in E4M3.

It implements `manual_fp8` by blocks of keys: 2^8 P, relative to the maximum so far, is rounded to E4M3. Each block's
product with the values is added in float32: the FP8 tensor core accumulates with 14 bits, too few for 16384 keys.
"""

import functools
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.architecture import Architecture
from te_bench.kernels.attention.fp8_quantize import BLOCK, PADDED_ROWS, Operands, keep_positive, padded
from te_bench.kernels.attention.portable.launch import Tile, heads_in_l2, row_strides, run
from te_bench.kernels.attention.portable.scores import LN_2, LOG2_E, pick_tile, row_maxima, store_tile
from te_bench.kernels.tile import INTERPRETED, exp2, rounded, to_fp8

OFFSET = tl.constexpr(8.0)  # P is rounded as 2^8 P: manual_fp8.WEIGHTS


#: {wider of the two head widths: tile}. Swept on an H200 for D64 at T1024 and 8192, for D128 at T2048 to 16384
#: (benchmarks/NOTES.md); 32 is not.
FORWARD: Mapping[int, Tile] = {
    32: Tile(64, 128, 4, 2, 128),
    64: Tile(64, 128, 4, 2, 128),
    128: Tile(64, 128, 4, 2, 168, halves=2),
}


@triton.jit
def dot_fp8(a, b):
    """Return a b in float32 of FP8 operands, without an accumulator input."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def load_whole_tile(base, stride, start_m, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows start_m to start_m + BLOCK_M of a tensor padded to whole tiles."""
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, COLUMNS)
    return tl.load(base + start_m.to(tl.int64) * stride + rows[:, None] * stride + columns[None, :])


@triton.jit
def permute_to_slots(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return p's columns in the order of `order_slots`, which the values have."""
    apart = tl.reshape(p, (BLOCK_M, BLOCK_N // 16, 2, 4, 2))
    return tl.reshape(tl.permute(apart, (0, 1, 3, 2, 4)), (BLOCK_M, BLOCK_N))


@triton.jit
def not_after(last, BLOCK_N: tl.constexpr):
    """Return which of BLOCK_N keys are not after `last`, one number per row or for all.

    It works on groups of eight keys: few numbers then differ by thread, and they take few registers.
    """
    left = last[:, None] - tl.arange(0, 8)[None, :]
    visible = (8 * tl.arange(0, BLOCK_N // 8))[None, :, None] <= left[:, None, :]
    return tl.reshape(visible, (last.shape[0], BLOCK_N))


@triton.jit
def _attend_blocks(
    acc, acc_high, l_i, m_i, q, k, v, start, stop, last, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HALVES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Process keys start to stop; rows see all of them or, with EDGE, those up to `last`; values are transposed.

    acc_high: the second half of the features, if HALVES is 2.
    """
    features = tl.arange(0, BLOCK_DV // HALVES)
    offs_n = tl.arange(0, BLOCK_N)
    for start_n in tl.range(start, stop, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        qk = dot_fp8(q, load_whole_tile(k, BLOCK_D, start_n, BLOCK_N, BLOCK_D).T)
        if EDGE:
            qk = tl.where(not_after(last - start_n, BLOCK_N), qk, float("-inf"))
        m_new = tl.maximum(m_i, row_maxima(qk) * scale, propagate_nan=tl.PropagateNan.ALL)
        p = exp2(qk * scale - (m_new - OFFSET)[:, None])
        alpha = exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        p_fp8 = to_fp8(permute_to_slots(p, BLOCK_M, BLOCK_N), tl.float8e4nv)
        if BLOCK_N == BLOCK:
            at = v + start_n.to(tl.int64) * BLOCK_DV
        else:
            offset = (start_n // BLOCK).to(tl.int64) * (BLOCK * BLOCK_DV) + start_n % BLOCK
            at = v + tl.multiple_of(offset, BLOCK_N)
        v_tile = tl.load(at + features[:, None] * BLOCK + offs_n[None, :])
        acc = acc * alpha[:, None] + dot_fp8(p_fp8, v_tile.T)
        if HALVES == 2:
            v_tile = tl.load(at + (BLOCK_DV // 2 + features)[:, None] * BLOCK + offs_n[None, :])
            acc_high = acc_high * alpha[:, None] + dot_fp8(p_fp8, v_tile.T)
        m_i = m_new
    return acc, acc_high, l_i, m_i


@triton.jit(do_not_specialize=PADDED_ROWS)
def fp8_attention_forward_kernel(
    q, k, v, q_inv, k_inv, v_inv, out, lse, out_b, out_h, out_t, pairs, H, T, S, group, near, padded_q, padded_k, scale,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of BLOCK_M rows. q (B, H, padded_q, BLOCK_D), k, v (B, Hkv, ...). EVEN: BLOCK_N divides S."""
    tl.static_assert(BLOCK % BLOCK_N == 0)
    blocks = tl.cdiv(T, BLOCK_M)
    order, pair = pick_tile(tl.program_id(0), blocks, pairs, near)
    start_m = (blocks - 1 - order) * BLOCK_M  # the last causal rows see the most
    kv = pair // H * (H // group) + pair % H // group
    k += kv.to(tl.int64) * padded_k * BLOCK_D
    v += kv.to(tl.int64) * padded_k * BLOCK_DV
    q_tile = load_whole_tile(q + pair.to(tl.int64) * padded_q * BLOCK_D, BLOCK_D, start_m, BLOCK_M, BLOCK_D)
    scale = keep_positive(tl.load(q_inv + pair) * (scale * LOG2_E) * tl.load(k_inv + kv))
    offs_m = start_m + tl.arange(0, BLOCK_M)
    end = S
    inner = S // BLOCK_N * BLOCK_N
    last = tl.full((1,), S - 1, tl.int32)
    if CAUSAL:
        end = tl.minimum(S, start_m + BLOCK_M)
        inner = tl.minimum(S, start_m + 1) // BLOCK_N * BLOCK_N
        last = tl.minimum(offs_m, S - 1)
    acc = tl.zeros((BLOCK_M, BLOCK_DV // HALVES), tl.float32)
    acc_high = acc
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    bounds = 0, inner, end
    for EDGE in tl.static_range(2):
        if not EDGE or CAUSAL or not EVEN:
            acc, acc_high, l_i, m_i = _attend_blocks(
                acc, acc_high, l_i, m_i, q_tile, k, v, bounds[EDGE], bounds[EDGE + 1], last, scale,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HALVES, EDGE == 1,
            )  # fmt: skip
    tl.store(lse + pair.to(tl.int64) * T + offs_m, (m_i - OFFSET + tl.log2(l_i)) * LN_2, mask=offs_m < T)
    out += (pair // H).to(tl.int64) * out_b + (pair % H).to(tl.int64) * out_h
    by = (tl.load(v_inv + kv) / l_i)[:, None]
    HALF: tl.constexpr = BLOCK_DV // HALVES
    low = rounded(acc * by, out.dtype.element_ty)
    store_tile(out, out_t, start_m, T, low, BLOCK_M, HALF, DV if DV < HALF else HALF)
    if HALVES == 2 and DV > HALF:
        high = rounded(acc_high * by, out.dtype.element_ty)
        store_tile(out + HALF, out_t, start_m, T, high, BLOCK_M, HALF, DV - HALF)


@functools.cache
def forward_tile(wide: int, here: Architecture) -> Tile:
    """Return the tile by the wider head. Without warpgroup products it has twice the warps, each holding less."""
    tile = FORWARD[wide]
    return tile if here.warpgroups else tile._replace(warps=2 * tile.warps, registers=None)


def forward(
    out: Tensor, lse: Tensor, fp8: Operands, keys: int, causal: bool, scale: float, given: Tile | None = None
) -> None:
    """Write out (B, H, T, Dv) and lse (B, H, T) float32 from q and `keys` keys by rows, v transposed; none is empty."""
    q, k, v = fp8
    (batch, heads, rows, features), (kv_heads, padded_k) = out.shape, k.by_rows.shape[1:3]
    (padded_q, wide), wide_v, group = q.by_rows.shape[2:], v.transposed.shape[3], heads // kv_heads
    tile = given or forward_tile(max(wide, wide_v), architecture.of_device(out.device))
    assert padded_q == padded(rows)
    near = heads_in_l2(batch * heads, group, padded_k, k.by_rows, v.transposed.mT)
    integers = *row_strides(out), batch * heads, heads, rows, keys, group, near, padded_q, padded_k
    constants: dict[str, Any] = tile.constants() | {
        "DV": features, "BLOCK_D": wide, "BLOCK_DV": wide_v, "CAUSAL": causal, "EVEN": keys % tile.keys == 0,
        "HALVES": tile.halves, "maxnreg": tile.registers,
    }  # fmt: skip
    tensors = (q.by_rows, k.by_rows, v.transposed, q.scale_inv, k.scale_inv, v.scale_inv, out, lse)
    grid = triton.cdiv(rows, tile.rows) * batch * heads
    run(fp8_attention_forward_kernel, grid, tensors, integers, constants, (scale,))
