# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The backward kernels of fused attention, and their launcher.

With P the weights, dP = dO V^T, delta the rows' sums of out * dO and dS = P (dP - delta): dV = P^T dO, dK = scale dS^T
Q, dQ = scale dS K. One kernel computes dQ, a tile of rows per program; the next dK and dV, a tile of keys per program.
Source: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.architecture import Architecture
from te_bench.kernels.attention.autograd import Gradients
from te_bench.kernels.attention.portable.forward import (
    Extent,
    Packed,
    count_sizes,
    find_starts,
    pad_widths,
)
from te_bench.kernels.attention.portable.launch import DRAWN, Kept, Tile, fit, heads_in_l2, row_strides, run
from te_bench.kernels.attention.portable.scores import (
    LOG2_E,
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
    row_range,
    store_tile,
)
from te_bench.kernels.tile import exp2, rounded

#: {wider of the two head widths: tile} in half precision, for each pass; the names say which are rows and keys.
OF_ROWS: Mapping[int, Tile] = {  # dQ
    16: Tile(64, 64, 4, 2),
    32: Tile(64, 64, 4, 2),
    64: Tile(64, 64, 4, 3),
    128: Tile(128, 64, 8, 2),
    256: Tile(32, 32, 4, 1),
}
OF_KEYS: Mapping[int, Tile] = {  # dK and dV
    16: Tile(64, 64, 4, 2),
    32: Tile(64, 64, 4, 2),
    64: Tile(64, 64, 4, 2),
    128: Tile(32, 128, 8, 3),
    256: Tile(32, 32, 8, 1),
}
#: Tiles where random numbers, or the loop over query heads, take registers that the smaller tile would spill.
OF_KEYS_CROWDED: Mapping[int, Tile] = {**OF_KEYS, 64: Tile(64, 128, 8, 3)}
#: Tiles where packed sequences' lengths take registers, too, besides the loop over query heads.
OF_KEYS_PACKED: Mapping[int, Tile] = {**OF_KEYS, 64: Tile(32, 128, 8, 2), 128: Tile(16, 128, 8, 2)}


@triton.jit
def _sum_rows(
    out, do, stride_out, stride_do, lse, lse_2, delta, pair, start_m, T, padded,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return dO, lse_2 and delta of BLOCK_M rows, and store the latter two for the pass over the keys.

    lse_2: each row's logsumexp to base 2; infinity, for weights of 0, in rows without visible keys or beyond T.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    do_tile = load_tile(do, stride_do, start_m, T, BLOCK_M, BLOCK_DV, DV, WHOLE)
    out_tile = load_tile(out, stride_out, start_m, T, BLOCK_M, BLOCK_DV, DV, WHOLE)
    delta_tile = tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + pair.to(tl.int64) * padded + offs_m, delta_tile)
    if PACKED:  # lse begins with the sequence
        lse_tile = tl.load(lse + offs_m, mask=offs_m < T, other=float("inf"))
    else:
        lse_tile = tl.load(lse + pair.to(tl.int64) * T + offs_m, mask=offs_m < T, other=float("inf"))
    lse_tile = tl.where(lse_tile == float("-inf"), float("inf"), lse_tile) * LOG2_E
    tl.store(lse_2 + pair.to(tl.int64) * padded + offs_m, lse_tile)
    return do_tile, lse_tile, delta_tile


@triton.jit
def _add_dq(
    dq, held, kv, start, stop, start_m, limits, scale, drop,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    WHOLE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add the share of keys start to stop to dq; without EDGE, all rows see all these keys."""
    q, do, lse_2, delta = held
    k, stride_k, v, stride_v = kv
    seed, head, dropout = drop
    S = limits[1]
    offs_m = start_m + tl.arange(0, BLOCK_M)
    for start_n in tl.range(start, stop, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        k_tile = load_tile(k, stride_k, start_n, S, BLOCK_N, BLOCK_D, D, WHOLE or not EDGE)
        v_tile = load_tile(v, stride_v, start_n, S, BLOCK_N, BLOCK_DV, DV, WHOLE or not EDGE)
        qk = dot(q, k_tile.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        dp = dot(do, v_tile.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        offs_n = start_n + tl.arange(0, BLOCK_N)
        if EDGE:
            visible = is_visible(offs_m[:, None], offs_n[None, :], limits, HAS_LEFT, HAS_RIGHT, MASK, WHOLE)
            qk = tl.where(visible, qk, float("-inf"))
        p = exp2(qk * scale - lse_2[:, None])
        if DROPOUT:
            dp *= dropout_factors(seed, head, start_m, start_n, dropout, BLOCK_M, BLOCK_N, False)
        ds = p * (dp - delta[:, None])
        dq = dot(rounded(ds, k_tile.dtype), k_tile, dq)
        if HAS_LEFT:  # as in the forward pass
            dq = await_product(dq)
    return dq


@triton.jit
def attention_backward_rows_kernel(
    q, k, v, do, out, lse, lse_2, delta, dq, mask, seed, starts_q, starts_k,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_t, out_b, out_h, out_t, dq_b, dq_h, dq_t,
    mask_b, mask_h, mask_t, mask_s, batch, H, T, S, group, near, padded, left, right, scale, dropout, total_rows,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute dQ, lse_2 and delta of BLOCK_M rows. PACKED: as in the forward pass."""
    blocks = padded // BLOCK_M
    order, pair = pick_tile(tl.program_id(0), blocks, batch * H, near)
    start_m = (blocks - 1 - order) * BLOCK_M
    b = (pair // H).to(tl.int64)
    h = (pair % H).to(tl.int64)
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    if MASK != NO_MASK:
        mask += b * mask_b + h * mask_h
    if PACKED:
        begin_q, T = find_sequence(starts_q, b)
        begin_k, S = find_sequence(starts_k, b)
        S = tl.where(start_m < T, S, 0)
        q += begin_q.to(tl.int64) * q_t
        do += begin_q.to(tl.int64) * do_t
        out += begin_q.to(tl.int64) * out_t
        dq += begin_q.to(tl.int64) * dq_t
        k += begin_k.to(tl.int64) * k_s
        v += begin_k.to(tl.int64) * v_s
        lse += h * total_rows + begin_q
    do_tile, lse_tile, delta_tile = _sum_rows(
        out + b * out_b + h * out_h, do + b * do_b + h * do_h, out_t, do_t, lse, lse_2, delta, pair, start_m, T,
        padded, DV, BLOCK_M, BLOCK_DV, WHOLE, PACKED,
    )  # fmt: skip
    q_tile = load_tile(q + b * q_b + h * q_h, q_t, start_m, T, BLOCK_M, BLOCK_D, D, WHOLE)
    bounds = key_range(start_m, S, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, MASK)
    dq_tile = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for PART in tl.static_range(3):  # as in the forward pass
        if has_part(PART, HAS_LEFT, HAS_RIGHT, MASK, WHOLE):
            dq_tile = _add_dq(
                dq_tile, (q_tile, do_tile, lse_tile, delta_tile), (k, k_s, v, v_s), bounds[PART], bounds[PART + 1], start_m,
                (T, S, left, right, mask, mask_t, mask_s), scale * LOG2_E, (seed, pair, dropout),
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, WHOLE, PART != 1,
            )  # fmt: skip
    result = rounded(dq_tile * scale, dq.dtype.element_ty)
    store_tile(dq + b * dq_b + h * dq_h, dq_t, start_m, T, result, BLOCK_M, BLOCK_D, D)


@triton.jit
def _add_dk_dv(
    dk, dv, held, rows, bounds, start_n, limits, scale, drop,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    WHOLE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add the share of rows inner to outer to dk and dv; EDGE: begin to inner and outer to end, maybe beyond T.

    Scores and weights are transposed (keys by rows): dV's and dK's operands go from registers to the tensor core.
    """
    k, v = held
    q, stride_q, do, stride_do, lse_2, delta = rows
    begin, inner, outer, end = bounds
    seed, head, dropout = drop
    T = limits[0]
    TAIL: tl.constexpr = EDGE and not WHOLE
    offs_n = start_n + tl.arange(0, BLOCK_N)
    if EDGE:
        start, stop = begin, inner + end - outer
    else:
        start, stop = inner, outer
    for at in tl.range(start, stop, BLOCK_M):
        start_m = at
        if EDGE and (HAS_LEFT or not WHOLE):
            start_m = tl.where(at < inner, at, at + outer - inner)
        start_m = tl.multiple_of(start_m, BLOCK_M)
        q_tile = load_tile(q, stride_q, start_m, T, BLOCK_M, BLOCK_D, D, not TAIL)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        qk = dot(k, q_tile.T, tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        if EDGE or MASK != NO_MASK:
            visible = is_visible(offs_m[None, :], offs_n[:, None], limits, HAS_LEFT, HAS_RIGHT, MASK, WHOLE)
            if TAIL:  # a row of zeros times a key with an infinity would be NaN
                visible = visible & (offs_m < T)[None, :]
            qk = tl.where(visible, qk, float("-inf"))
        p = exp2(qk * scale - tl.load(lse_2 + offs_m)[None, :])
        do_tile = load_tile(do, stride_do, start_m, T, BLOCK_M, BLOCK_DV, DV, not TAIL)
        if DROPOUT:
            factors = dropout_factors(seed, head, start_m, start_n, dropout, BLOCK_M, BLOCK_N, True)
            dv = dot(rounded(p * factors, do_tile.dtype), do_tile, dv)
        else:
            dv = dot(rounded(p, do_tile.dtype), do_tile, dv)
        delta_tile = tl.load(delta + offs_m)
        dp = dot(v, do_tile.T, tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        if DROPOUT:
            dp *= factors
        ds = rounded(p * (dp - delta_tile[None, :]), q_tile.dtype)
        dk = await_product(dot(ds, q_tile, dk))
    return dk, dv


@triton.jit
def attention_backward_keys_kernel(
    q, k, v, do, lse_2, delta, dk, dv, mask, seed, starts_q, starts_k,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_t, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    mask_b, mask_h, mask_t, mask_s, batch, H, T, S, group, near, padded, left, right, scale, dropout,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_N keys, over GROUP query heads."""
    order, pair = pick_tile(tl.program_id(0), tl.cdiv(S, BLOCK_N), batch * (H // GROUP), near)
    start_n = order * BLOCK_N  # most rows see the first causal keys
    b = (pair // (H // GROUP)).to(tl.int64)
    kv_head = (pair % (H // GROUP)).to(tl.int64)
    if PACKED:
        begin_q, T = find_sequence(starts_q, b)
        begin_k, S = find_sequence(starts_k, b)
        T = tl.where(start_n < S, T, 0)
        q += begin_q.to(tl.int64) * q_t
        do += begin_q.to(tl.int64) * do_t
        k += begin_k.to(tl.int64) * k_s
        v += begin_k.to(tl.int64) * v_s
        dk += begin_k.to(tl.int64) * dk_s
        dv += begin_k.to(tl.int64) * dv_s
    k_tile = load_tile(k + b * k_b + kv_head * k_h, k_s, start_n, S, BLOCK_N, BLOCK_D, D, WHOLE)
    v_tile = load_tile(v + b * v_b + kv_head * v_h, v_s, start_n, S, BLOCK_N, BLOCK_DV, DV, WHOLE)
    bounds = row_range(start_n, T, S, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, MASK)
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    for g in range(GROUP):
        h = kv_head * GROUP + g
        head = (b * H + h).to(tl.int32)
        q_h0 = q + b * q_b + h * q_h
        do_h0 = do + b * do_b + h * do_h
        lse_2_h0 = lse_2 + head.to(tl.int64) * padded
        delta_h0 = delta + head.to(tl.int64) * padded
        mask_h0 = 0
        if MASK != NO_MASK:
            mask_h0 = mask + b * mask_b + h * mask_h
        for EDGE in tl.static_range(1, -1, -1):
            if not EDGE or (MASK == NO_MASK and (HAS_LEFT or HAS_RIGHT)) or not WHOLE:
                dk_tile, dv_tile = _add_dk_dv(
                    dk_tile, dv_tile, (k_tile, v_tile), (q_h0, q_t, do_h0, do_t, lse_2_h0, delta_h0), bounds, start_n,
                    (T, S, left, right, mask_h0, mask_t, mask_s), scale * LOG2_E, (seed, head, dropout),
                    D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, WHOLE, EDGE == 1,
                )  # fmt: skip
    dk_tile = rounded(dk_tile * scale, dk.dtype.element_ty)
    store_tile(dk + b * dk_b + kv_head * dk_h, dk_s, start_n, S, dk_tile, BLOCK_N, BLOCK_D, D)
    DTYPE: tl.constexpr = dv.dtype.element_ty
    store_tile(dv + b * dv_b + kv_head * dv_h, dv_s, start_n, S, rounded(dv_tile, DTYPE), BLOCK_N, BLOCK_DV, DV)


@functools.cache
def backward_tiles(
    d: int, dv: int, dropout: bool, shared_heads: bool, packed: bool, here: Architecture
) -> tuple[Tile, Tile]:
    """Return the tiles for dQ, and for dK and dV, of heads of these padded widths, on that GPU."""
    widest, scores = max(d, dv), 3 + DRAWN * dropout
    of_keys = OF_KEYS
    if not here.products_from_registers:  # the other tables suit Hopper's registers
        crowded = OF_KEYS_CROWDED if dropout or shared_heads else OF_KEYS
        of_keys = OF_KEYS_PACKED if packed and shared_heads else crowded
    return (
        fit(OF_ROWS[widest], Kept("rows", d, d + dv, d + dv, scores), here),
        fit(of_keys[widest], Kept("keys", d + dv, d + dv, d + dv, scores), here),
    )


class Attended(NamedTuple):
    """The inputs and results of the forward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    seed: Tensor | None


def backward(
    attended: Attended, dout: Tensor, extent: Extent, scale: float, dropout: float, packed: Packed | None = None,
    gradients: Gradients | None = None, tiles: tuple[Tile, Tile] | None = None,
) -> Gradients:  # fmt: skip
    """Return dq, dk, dv in the inputs' dtype and memory order; extent to packed are the forward pass's.

    They are bitwise the same in every run. gradients: memory for them, not for packed sequences. tiles: for dQ, and for
    dK and dV, instead of the tables'.
    """
    q, k, v, out, lse, seed = attended
    shape = batch, heads, rows, keys, group = count_sizes(q, k, packed)
    common = {**pad_widths(q, v), **extent.constants(), "DROPOUT": dropout > 0, "PACKED": packed is not None}
    of_rows, of_keys = tiles or backward_tiles(
        common["BLOCK_D"], common["BLOCK_DV"], dropout > 0, group > 1, packed is not None,
        architecture.of_device(q.device),
    )  # fmt: skip
    block = max(of_keys.rows, of_rows.rows)
    padded = triton.cdiv(rows, block) * block
    # Tiles of rows beyond the last are read only behind a mask, which is absent if tiles divide the rows.
    assert packed or padded - rows < of_rows.rows or rows % of_rows.rows, f"tiles {of_rows}, {of_keys} of {rows} rows"
    empty_like = torch.empty_like if packed is None else torch.zeros_like  # rows of no sequence are 0
    dq, dk, dv = gradients or (empty_like(q), empty_like(k), empty_like(v))
    lse_2, delta = q.new_empty(2, batch, heads, padded, dtype=torch.float32).unbind()
    tail = extent.mask, seed, *find_starts(packed)

    sizes, ends = (*extent.strides(), *shape), (padded, extent.left, extent.right)
    kv_pairs = batch * k.shape[1]

    def constants(tile: Tile) -> dict[str, Any]:
        return common | tile.constants() | {"WHOLE": packed is None and tile.divides(rows, keys)}

    run(
        attention_backward_rows_kernel,
        padded // of_rows.rows * batch * heads,
        (q, k, v, dout, out, lse, lse_2, delta, dq, *tail),
        (*row_strides(q, k, v, dout, out, dq), *sizes, heads_in_l2(batch * heads, group, keys, k, v), *ends),
        constants(of_rows),
        (scale, dropout),
        (q.shape[2],),
    )
    run(
        attention_backward_keys_kernel,
        triton.cdiv(keys, of_keys.keys) * kv_pairs,
        (q, k, v, dout, lse_2, delta, dk, dv, *tail),
        (*row_strides(q, k, v, dout, dk, dv), *sizes, heads_in_l2(kv_pairs, 1, rows * group, q, dout), *ends),
        constants(of_keys) | {"GROUP": group},
        (scale, dropout),
    )
    return dq, dk, dv
