# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The forward kernel of fused attention, and its launcher.

It follows FlashAttention-2 (Dao, arXiv:2307.08691): a program has a tile of rows and loops over the keys, keeping the
maximum, the sum and the weighted values. The loop is split in three, so that only blocks on the edge of the visible
range check indices. Scores are in units of log2(e), so that a weight is one multiplication and one exp2.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.architecture import Architecture
from te_bench.kernels.attention.autograd import empty_results
from te_bench.kernels.attention.portable.launch import DRAWN, Kept, Tile, fit, heads_in_l2, row_strides, run
from te_bench.kernels.attention.portable.scores import (
    LN_2,
    LOG2_E,
    LOWEST,
    NO_MASK,
    await_product,
    dot,
    dropout_factors,
    find_sequence,
    has_part,
    is_visible,
    key_range,
    load_tile,
    pick_tile,
    row_maxima,
    store_tile,
)
from te_bench.kernels.tile import exp2, rounded

#: {wider of the two head widths: tile} in half precision: 64 and 128 from a sweep on an H200 (benchmarks/NOTES.md), the
#: others by reasoning.
FORWARD: Mapping[int, Tile] = {
    16: Tile(128, 64, 4, 3),
    32: Tile(128, 64, 4, 3),
    64: Tile(64, 64, 4, 3),
    128: Tile(128, 64, 8, 3),
    256: Tile(64, 32, 8, 2),
}


@triton.jit
def _attend_blocks(
    acc, l_i, m_i, q, kv, start, stop, start_m, limits, scale, drop,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    WHOLE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Process keys start to stop; without EDGE, all rows see all these keys."""
    k, stride_k, v, stride_v = kv
    seed, head, dropout = drop
    S = limits[1]
    offs_m = start_m + tl.arange(0, BLOCK_M)
    for start_n in tl.range(start, stop, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        k_tile = load_tile(k, stride_k, start_n, S, BLOCK_N, BLOCK_D, D, WHOLE or not EDGE)
        qk = dot(q, k_tile.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        offs_n = start_n + tl.arange(0, BLOCK_N)
        if EDGE:
            visible = is_visible(offs_m[:, None], offs_n[None, :], limits, HAS_LEFT, HAS_RIGHT, MASK, WHOLE)
            qk = tl.where(visible, qk, float("-inf"))
        m_new = tl.maximum(m_i, row_maxima(qk) * scale, propagate_nan=tl.PropagateNan.ALL)
        p = exp2(qk * scale - m_new[:, None])
        alpha = exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        if DROPOUT:
            p *= dropout_factors(seed, head, start_m, start_n, dropout, BLOCK_M, BLOCK_N, False)
        acc = acc * alpha[:, None]
        v_tile = load_tile(v, stride_v, start_n, S, BLOCK_N, BLOCK_DV, DV, WHOLE or not EDGE)
        acc = dot(rounded(p, v_tile.dtype), v_tile, acc)
        if HAS_LEFT:  # in three successive loops the assembler would wait for each product (C7515)
            acc = await_product(acc)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def attention_forward_kernel(
    q, k, v, out, lse, mask, seed, starts_q, starts_k,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_t, mask_b, mask_h, mask_t, mask_s,
    batch, H, T, S, group, near, left, right, scale, dropout, total_rows,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    WHOLE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of BLOCK_M rows. WHOLE: S is a multiple of BLOCK_N and T one of BLOCK_M.

    PACKED: `batch` packed sequences of at most T rows and S keys begin at starts_q and starts_k.
    """
    blocks = tl.cdiv(T, BLOCK_M)
    order, pair = pick_tile(tl.program_id(0), blocks, batch * H, near)
    start_m = (blocks - 1 - order) * BLOCK_M  # the last causal rows see the most
    b = (pair // H).to(tl.int64)
    h = (pair % H).to(tl.int64)
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    if MASK != NO_MASK:
        mask += b * mask_b + h * mask_h
    if PACKED:
        begin_q, T = find_sequence(starts_q, b)
        begin_k, S = find_sequence(starts_k, b)
        S = tl.where(start_m < T, S, 0)  # a shorter sequence has fewer blocks than the longest
        q += begin_q.to(tl.int64) * q_t
        k += begin_k.to(tl.int64) * k_s
        v += begin_k.to(tl.int64) * v_s
        out += begin_q.to(tl.int64) * out_t
        lse += h * total_rows + begin_q
    q_tile = load_tile(q + b * q_b + h * q_h, q_t, start_m, T, BLOCK_M, BLOCK_D, D, WHOLE)

    bounds = key_range(start_m, S, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, MASK)
    scale *= LOG2_E
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)  # finite: after only -inf scores, -inf - -inf would be NaN
    for PART in tl.static_range(3):  # keys crossed by the left end, seen by all rows, crossed by the right end
        if has_part(PART, HAS_LEFT, HAS_RIGHT, MASK, WHOLE):
            acc, l_i, m_i = _attend_blocks(
                acc, l_i, m_i, q_tile, (k, k_s, v, v_s), bounds[PART], bounds[PART + 1], start_m,
                (T, S, left, right, mask, mask_t, mask_s), scale, (seed, pair, dropout),
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, WHOLE, PART != 1,
            )  # fmt: skip

    # Without masks every row sees a key, so a sum of 0 means that all scores are -inf.
    if not HAS_LEFT and MASK == NO_MASK:
        l_i = tl.where((l_i == 0.0) & (S > 0), float("nan"), l_i)
    share = 1.0 / tl.where(l_i == 0.0, 1.0, l_i)  # a row without visible keys gives 0
    offs_m = start_m + tl.arange(0, BLOCK_M)
    if PACKED:
        tl.store(lse + offs_m, (m_i + tl.log2(l_i)) * LN_2, mask=offs_m < T)
    else:
        tl.store(lse + pair.to(tl.int64) * T + offs_m, (m_i + tl.log2(l_i)) * LN_2, mask=offs_m < T)
    result = rounded(acc * share[:, None], out.dtype.element_ty)
    store_tile(out + b * out_b + h * out_h, out_t, start_m, T, result, BLOCK_M, BLOCK_DV, DV)


class Extent(NamedTuple):
    """The visible keys of row i: i - left to i + right, -1 for no end, except where the mask is 1."""

    left: int
    right: int
    mask: Tensor | None  # uint8, (B, H, T, S), usually expanded

    def kind(self) -> int:
        if self.mask is None:
            return 0
        return 1 if self.mask.stride(2) == 0 else 2

    def strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.mask is None else self.mask.stride()

    def constants(self) -> dict[str, Any]:
        return {"HAS_LEFT": self.left >= 0, "HAS_RIGHT": self.right >= 0, "MASK": self.kind()}


class Packed(NamedTuple):
    """Packed sequences in q (1, H, total, D), k and v: their starts, and the lengths of the longest."""

    starts_q: Tensor  # (sequences + 1,), int32 or int64
    starts_k: Tensor
    rows: int
    keys: int


def pad_widths(q: Tensor, v: Tensor) -> dict[str, int]:
    """Return the heads' widths and their tiles' widths, powers of two of at least 16, as tensor cores need."""
    d, dv = q.shape[-1], v.shape[-1]
    return {
        "D": d,
        "DV": dv,
        "BLOCK_D": max(16, triton.next_power_of_2(d)),
        "BLOCK_DV": max(16, triton.next_power_of_2(dv)),
    }


@functools.cache
def forward_tile(d: int, dv: int, dropout: bool, here: Architecture) -> Tile:
    """Return the tile for heads of these padded widths, on that GPU."""
    return fit(FORWARD[max(d, dv)], Kept("rows", dv, d, d + dv, 2 + DRAWN * dropout), here)


def count_sizes(q: Tensor, k: Tensor, packed: Packed | None) -> tuple[int, int, int, int, int]:
    """Return the numbers of sequences, heads, rows and keys (of the longest), and query heads per key head."""
    if packed is None:
        return q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    return len(packed.starts_q) - 1, q.shape[1], packed.rows, packed.keys, q.shape[1] // k.shape[1]


def find_starts(packed: Packed | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if packed is None else (packed.starts_q, packed.starts_k)


def forward(
    q: Tensor, k: Tensor, v: Tensor, extent: Extent, scale: float, dropout: float, seed: Tensor | None,
    given: Tile | None = None, packed: Packed | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (B, H, T, Dv) in q's dtype, memory order (B, T, H, Dv), and lse (B, H, T) float32, natural logarithms.

    Last strides must be 1. seed (2,) int64, for dropout > 0: the generator's key and one word of its counter.
    """
    batch, heads, rows, keys, group = count_sizes(q, k, packed)
    sizes = pad_widths(q, v)
    tile = given or forward_tile(sizes["BLOCK_D"], sizes["BLOCK_DV"], dropout > 0, architecture.of_device(q.device))
    out, lse = empty_results(q, v)
    if packed is not None:  # for rows of no sequence
        out.zero_()
        lse.fill_(float("-inf"))
    near = heads_in_l2(batch * heads, group, keys, k, v)
    strides = *row_strides(q, k, v, out), *extent.strides()
    constants = sizes | extent.constants() | tile.constants()
    constants |= {
        "DROPOUT": dropout > 0,
        "WHOLE": packed is None and tile.divides(rows, keys),
        "PACKED": packed is not None,
    }
    run(
        attention_forward_kernel,
        triton.cdiv(rows, tile.rows) * batch * heads,
        (q, k, v, out, lse, extent.mask, seed, *find_starts(packed)),
        (*strides, batch, heads, rows, keys, group, near, extent.left, extent.right),
        constants,
        (scale, dropout),
        (q.shape[2],),
    )
    return out, lse
