# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The backward kernels of FP8 attention, and their launcher: S and dP from FP8 operands, the other products in bf16.

They implement `manual_fp8` in two passes, as `backward`: dQ per tile of rows, then dK and dV per tile of keys. S uses
the forward pass's q and k; otherwise the weights would not sum to 1. Both FP8 products contract the heads' width, along
which all four operands are contiguous: nothing is transposed. dQ, dK and dV contract rows or keys: FP8 would need K, Q
and dO transposed as well.
"""

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.architecture import Architecture
from te_bench.kernels.attention.autograd import Gradients
from te_bench.kernels.attention.fp8_quantize import (
    E4M3,
    PADDED_ROWS,
    Heads,
    Operands,
    amax_bits,
    find_head_scale,
    keep_positive,
    padded,
    width,
)
from te_bench.kernels.attention.portable.fp8_forward import dot_fp8, load_whole_tile
from te_bench.kernels.attention.portable.launch import Kept, Tile, fit, heads_in_l2, row_strides, run
from te_bench.kernels.attention.portable.scores import LOG2_E, await_product, dot, load_tile, pick_tile, store_tile
from te_bench.kernels.tile import exp2, rounded, to_fp8

#: {wider of the two head widths: tile}. They compile for sm_90a without spills, and are not swept.
OF_ROWS: Mapping[int, Tile] = {  # dQ
    32: Tile(64, 64, 4, 2),
    64: Tile(64, 64, 4, 2),
    128: Tile(128, 64, 8, 2),
}
OF_KEYS: Mapping[int, Tile] = {  # dK and dV
    32: Tile(64, 64, 4, 2),
    64: Tile(64, 64, 4, 2),
    128: Tile(32, 128, 8, 2),
}
DELTA_ROWS = 64


@triton.jit(do_not_specialize=PADDED_ROWS)
def fp8_attention_delta_kernel(
    do, out, lse, bits, do8, do_inv, lse_2, delta, do_b, do_h, do_t, out_b, out_h, out_t, H, T, padded,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute padded FP8 dO and, for BLOCK_M rows, lse_2 and delta, the sums of O times dO after FP8 rounding.

    lse_2: each row's logsumexp to base 2; infinity, for weights of 0, in rows beyond T.
    """
    pair = tl.program_id(0) // (padded // BLOCK_M)
    start_m = tl.program_id(0) % (padded // BLOCK_M) * BLOCK_M
    b = (pair // H).to(tl.int64)
    h = (pair % H).to(tl.int64)
    scale, inverse = find_head_scale(tl.load(bits + pair))
    if start_m == 0:
        tl.store(do_inv + pair, inverse)
    do_tile = load_tile(do + b * do_b + h * do_h, do_t, start_m, T, BLOCK_M, BLOCK_D, DV, False)
    out_tile = load_tile(out + b * out_b + h * out_h, out_t, start_m, T, BLOCK_M, BLOCK_D, DV, False)
    cast = to_fp8(do_tile.to(tl.float32) * scale, tl.float8e4nv)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    tl.store(do8 + (pair.to(tl.int64) * padded + offs_m[:, None]) * BLOCK_D + columns[None, :], cast)
    delta_tile = tl.sum(out_tile.to(tl.float32) * cast.to(tl.float32), 1) * inverse
    lse_tile = tl.load(lse + pair.to(tl.int64) * T + offs_m, mask=offs_m < T, other=float("inf")) * LOG2_E
    tl.store(delta + pair.to(tl.int64) * padded + offs_m, tl.where(offs_m < T, delta_tile, 0.0))
    tl.store(lse_2 + pair.to(tl.int64) * padded + offs_m, lse_tile)


@triton.jit
def _add_dq(
    dq, fp8, k, stride_k, held, start, stop, start_m, S, scale, dp_scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add the share of keys start to stop to dq. fp8: the tile's q and dO, k and v; k: unquantised."""
    q8, do8, k8, v8 = fp8
    lse_2, delta = held
    offs_m = start_m + tl.arange(0, BLOCK_M)
    for start_n in tl.range(start, stop, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        qk = dot_fp8(q8, load_whole_tile(k8, BLOCK_D, start_n, BLOCK_N, BLOCK_D).T)
        dp = dot_fp8(do8, load_whole_tile(v8, BLOCK_DV, start_n, BLOCK_N, BLOCK_DV).T)
        if EDGE:
            visible = (offs_n < S)[None, :]
            if CAUSAL:
                visible = visible & (offs_n[None, :] <= offs_m[:, None])
            qk = tl.where(visible, qk, float("-inf"))
        p = exp2(qk * scale - lse_2[:, None])
        ds = p * (dp * dp_scale - delta[:, None])
        k_tile = load_tile(k, stride_k, start_n, S, BLOCK_N, BLOCK_D, D, not EDGE)
        # Wait here: in two successive loops the assembler would wait for every product (C7515).
        dq = await_product(dot(rounded(ds, k_tile.dtype), k_tile, dq))
    return dq


@triton.jit
def fp8_attention_backward_rows_kernel(
    q8, k8, v8, do8, q_inv, k_inv, v_inv, do_inv, k, lse_2, delta, dq,
    k_b, k_h, k_s, dq_b, dq_h, dq_t, pairs, H, T, S, group, near, padded_q, padded_k, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute dQ of BLOCK_M rows. EVEN: BLOCK_N divides S."""
    blocks = tl.cdiv(T, BLOCK_M)
    order, pair = pick_tile(tl.program_id(0), blocks, pairs, near)
    start_m = (blocks - 1 - order) * BLOCK_M
    kv = pair // H * (H // group) + pair % H // group
    k += (pair // H).to(tl.int64) * k_b + (pair % H // group).to(tl.int64) * k_h
    k8 += kv.to(tl.int64) * padded_k * BLOCK_D
    v8 += kv.to(tl.int64) * padded_k * BLOCK_DV
    q_tile = load_whole_tile(q8 + pair.to(tl.int64) * padded_q * BLOCK_D, BLOCK_D, start_m, BLOCK_M, BLOCK_D)
    do_tile = load_whole_tile(do8 + pair.to(tl.int64) * padded_q * BLOCK_DV, BLOCK_DV, start_m, BLOCK_M, BLOCK_DV)
    rows = pair.to(tl.int64) * padded_q + start_m + tl.arange(0, BLOCK_M)
    lse_tile, delta_tile = tl.load(lse_2 + rows), tl.load(delta + rows)
    qk_scale = keep_positive(tl.load(q_inv + pair) * (scale * LOG2_E) * tl.load(k_inv + kv))
    dp_scale = tl.load(do_inv + pair) * tl.load(v_inv + kv)
    end = S
    inner = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(S, start_m + BLOCK_M)
        inner = tl.minimum(S, start_m + 1) // BLOCK_N * BLOCK_N
    dq_tile = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    bounds = 0, inner, end
    for EDGE in tl.static_range(2):
        if not EDGE or CAUSAL or not EVEN:
            dq_tile = _add_dq(
                dq_tile, (q_tile, do_tile, k8, v8), k, k_s, (lse_tile, delta_tile), bounds[EDGE], bounds[EDGE + 1], start_m,
                S, qk_scale, dp_scale, D, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CAUSAL, EDGE == 1,
            )  # fmt: skip
    dq += (pair // H).to(tl.int64) * dq_b + (pair % H).to(tl.int64) * dq_h
    store_tile(dq, dq_t, start_m, T, rounded(dq_tile * scale, dq.dtype.element_ty), BLOCK_M, BLOCK_D, D)


@triton.jit
def _add_dk_dv(
    dk, dv, held, fp8, rows, start, stop, start_n, T, scale, dp_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, WHOLE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add the share of rows start to stop to dk and dv, with scores transposed. rows: unquantised Q and dO.

    EDGE: some rows come before some keys. Rows beyond T have weight 0, and keys beyond S are not written.
    """
    k8, v8 = held
    q8, do8, lse_2, delta = fp8
    q, stride_q, do, stride_do = rows
    offs_n = start_n + tl.arange(0, BLOCK_N)
    for start_m in tl.range(start, stop, BLOCK_M):
        start_m = tl.multiple_of(start_m, BLOCK_M)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        qk = dot_fp8(k8, load_whole_tile(q8, BLOCK_D, start_m, BLOCK_M, BLOCK_D).T)
        if EDGE:
            qk = tl.where(offs_n[:, None] <= offs_m[None, :], qk, float("-inf"))
        p = exp2(qk * scale - tl.load(lse_2 + offs_m)[None, :])
        do_tile = load_tile(do, stride_do, start_m, T, BLOCK_M, BLOCK_DV, DV, WHOLE)
        dv = dot(rounded(p, do_tile.dtype), do_tile, dv)
        dp = dot_fp8(v8, load_whole_tile(do8, BLOCK_DV, start_m, BLOCK_M, BLOCK_DV).T)
        q_tile = load_tile(q, stride_q, start_m, T, BLOCK_M, BLOCK_D, D, WHOLE)
        ds = rounded(p * (dp * dp_scale - tl.load(delta + offs_m)[None, :]), q_tile.dtype)
        dk = await_product(dot(ds, q_tile, dk))
    return dk, dv


@triton.jit
def fp8_attention_backward_keys_kernel(
    q8, k8, v8, do8, q_inv, k_inv, v_inv, do_inv, q, do, lse_2, delta, dk, dv,
    q_b, q_h, q_t, do_b, do_h, do_t, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    pairs, H, T, S, group, near, padded_q, padded_k, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_N keys over GROUP query heads. pairs: sequences x key heads. WHOLE: BLOCK_M | T."""
    order, pair = pick_tile(tl.program_id(0), tl.cdiv(S, BLOCK_N), pairs, near)
    start_n = order * BLOCK_N  # most rows see the first causal keys
    b = (pair // (H // GROUP)).to(tl.int64)
    kv_head = (pair % (H // GROUP)).to(tl.int64)
    at = pair.to(tl.int64) * padded_k
    k_tile = load_whole_tile(k8 + at * BLOCK_D, BLOCK_D, start_n, BLOCK_N, BLOCK_D)
    v_tile = load_whole_tile(v8 + at * BLOCK_DV, BLOCK_DV, start_n, BLOCK_N, BLOCK_DV)
    k_scale = tl.load(k_inv + pair) * (scale * LOG2_E)
    v_scale = tl.load(v_inv + pair)
    begin = tl.full((), 0, tl.int32)
    inner = begin
    if CAUSAL:
        begin = tl.minimum(start_n // BLOCK_M * BLOCK_M, T)
        last = tl.minimum(tl.cdiv(start_n + BLOCK_N - 1, BLOCK_M) * BLOCK_M, tl.cdiv(T, BLOCK_M) * BLOCK_M)
        inner = tl.maximum(begin, last)
        inner = tl.where(start_n < T, inner, T)  # no row sees keys from T on
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    bounds = begin, inner, T
    for g in range(GROUP):
        h = kv_head * GROUP + g
        head = b * H + h
        qk_scale = keep_positive(k_scale * tl.load(q_inv + head))
        dp_scale = v_scale * tl.load(do_inv + head)
        q8_head, do8_head = q8 + head * padded_q * BLOCK_D, do8 + head * padded_q * BLOCK_DV
        q_head, do_head = q + b * q_b + h * q_h, do + b * do_b + h * do_h
        for PART in tl.static_range(0 if CAUSAL else 1, 2):
            dk_tile, dv_tile = _add_dk_dv(
                dk_tile, dv_tile, (k_tile, v_tile), (q8_head, do8_head, lse_2 + head * padded_q, delta + head * padded_q),
                (q_head, q_t, do_head, do_t), bounds[PART], bounds[PART + 1], start_n, T, qk_scale, dp_scale,
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, WHOLE, PART == 0,
            )  # fmt: skip
    dk_tile = rounded(dk_tile * scale, dk.dtype.element_ty)
    store_tile(dk + b * dk_b + kv_head * dk_h, dk_s, start_n, S, dk_tile, BLOCK_N, BLOCK_D, D)
    DTYPE: tl.constexpr = dv.dtype.element_ty
    store_tile(dv + b * dv_b + kv_head * dv_h, dv_s, start_n, S, rounded(dv_tile, DTYPE), BLOCK_N, BLOCK_DV, DV)


def quantize_dout(dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Heads, Tensor]:
    """Return dO in FP8 by rows, and (2, B, H, padded T) float32: lse_2 and delta. (B, H, T, D), last strides 1."""
    batch, heads, rows, features = dout.shape
    length, wide = padded(rows), width(features)
    info = dout.new_empty(2, batch, heads, length, dtype=torch.float32)
    do8 = dout.new_empty(batch, heads, length, wide, dtype=E4M3)
    inverse = dout.new_empty(batch, heads, dtype=torch.float32)
    integers = (*row_strides(dout, out), heads, rows, length)
    constants = {"DV": features, "BLOCK_D": wide, "BLOCK_M": DELTA_ROWS, "num_warps": 4}
    tensors = (dout, out, lse, amax_bits(dout), do8, inverse, *info.unbind())
    run(fp8_attention_delta_kernel, length // DELTA_ROWS * batch * heads, tensors, integers, constants)
    return Heads(do8, None, inverse), info


@functools.cache
def backward_tiles(wide: int, wide_v: int, here: Architecture) -> tuple[Tile, Tile]:
    """Return the tiles for dQ, and for dK and dV, of heads padded to these widths, on that GPU."""
    widest, both = max(wide, wide_v), wide + wide_v
    return (
        fit(OF_ROWS[widest], Kept("rows", wide, both, both, 3), here),
        fit(OF_KEYS[widest], Kept("keys", both, both, both, 3), here),
    )


def backward(
    gradients: Gradients, dout: Tensor, q: Tensor, k: Tensor, out: Tensor, lse: Tensor,
    fp8: Operands, causal: bool, scale: float, of_rows: Tile | None = None, of_keys: Tile | None = None,
) -> None:  # fmt: skip
    """Write dq, dk, dv; fp8: q, k and v in FP8 by rows. Last strides must be 1."""
    (batch, heads, rows, d), (kv_heads, keys), features = q.shape, k.shape[1:3], out.shape[3]
    group, (dq, dk, dv) = heads // kv_heads, gradients
    do8, info = quantize_dout(dout, out, lse)
    operands = *fp8, do8
    q8, k8, v8, dout8 = (x.by_rows for x in operands)
    (padded_q, wide), (padded_k, wide_v) = q8.shape[2:], v8.shape[2:]
    tensors = q8, k8, v8, dout8, *(x.scale_inv for x in operands)
    sizes = heads, rows, keys, group
    common = {"D": d, "BLOCK_D": wide, "BLOCK_DV": wide_v, "CAUSAL": causal}
    own_rows, own_keys = backward_tiles(wide, wide_v, architecture.of_device(q.device))
    tile = of_rows or own_rows
    near = heads_in_l2(batch * heads, group, padded_k, k8, v8, k)
    run(
        fp8_attention_backward_rows_kernel,
        triton.cdiv(rows, tile.rows) * batch * heads,
        (*tensors, k, *info.unbind(), dq),
        (*row_strides(k, dq), batch * heads, *sizes, near, padded_q, padded_k),
        common | tile.constants() | {"EVEN": keys % tile.keys == 0},
        (scale,),
    )
    tile = of_keys or own_keys
    near = heads_in_l2(batch * kv_heads, 1, padded_q * group, q8, dout8, q, dout)
    run(
        fp8_attention_backward_keys_kernel,
        triton.cdiv(keys, tile.keys) * batch * kv_heads,
        (*tensors, q, dout, *info.unbind(), dk, dv),
        (*row_strides(q, dout, dk, dv), batch * kv_heads, *sizes, near, padded_q, padded_k),
        common | tile.constants() | {"DV": features, "WHOLE": rows % tile.rows == 0, "GROUP": group},
        (scale,),
    )
