# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The backward kernels of FP8 attention, and their launcher: S and dP of FP8 operands, the other three products in bf16.

What `manual_fp8` says, in two passes as in `_backward_kernels`: a program has a tile of rows and makes dQ, then one has a
tile of keys and makes dK and dV. S comes from the forward pass's own q and k, or the weights would not add up to 1. Both
products in FP8 contract the heads' width, along which all four operands lie: nothing is transposed. dQ, dK and dV contract
rows or keys: K, Q and dO in FP8 would be wanted transposed, too.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.attention.fp8_quantize import (
    E4M3,
    PADDED_ROWS,
    Heads,
    amax_bits,
    head_scale,
    padded,
    positive,
    width,
)
from te_bench.kernels.attention.portable.forward import L2_BYTES, Tile, row_strides
from te_bench.kernels.attention.portable.fp8_forward import fp8_product, whole_tile
from te_bench.kernels.attention.portable.scores import LOG2_E, exp2, heavy_first, product, put, settled, tile
from te_bench.kernels.launch import launch, traits
from te_bench.kernels.tile import rounded, to_fp8

#: By the wider of the two heads. Compiled for sm_90a without spills; not swept yet.
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
    dout, out, lse, bits, come, come_inv, level, delta, dout_b, dout_h, dout_t, out_b, out_h, out_t, H, T, padded,
    DV: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dO in FP8, padded, and of ROWS rows level and delta, the sums of O and the dO that FP8 leaves.

    level: the logarithm, to base 2, of the rows' sums; infinity, whose weights are 0, for rows that are none.
    """
    pair = tl.program_id(0) // (padded // ROWS)
    first = tl.program_id(0) % (padded // ROWS) * ROWS
    b = (pair // H).to(tl.int64)
    h = (pair % H).to(tl.int64)
    scale, inverse = head_scale(tl.load(bits + pair))
    if first == 0:
        tl.store(come_inv + pair, inverse)
    data = tile(dout + b * dout_b + h * dout_h, dout_t, first, T, ROWS, WIDTH, DV, False)
    made = tile(out + b * out_b + h * out_h, out_t, first, T, ROWS, WIDTH, DV, False)
    cast = to_fp8(data.to(tl.float32) * scale, tl.float8e4nv)
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    tl.store(come + (pair.to(tl.int64) * padded + rows[:, None]) * WIDTH + columns[None, :], cast)
    sums = tl.sum(made.to(tl.float32) * cast.to(tl.float32), 1) * inverse
    value = tl.load(lse + pair.to(tl.int64) * T + rows, mask=rows < T, other=float("inf")) * LOG2_E
    tl.store(delta + pair.to(tl.int64) * padded + rows, tl.where(rows < T, sums, 0.0))
    tl.store(level + pair.to(tl.int64) * padded + rows, value)


@triton.jit
def _row_steps(
    dq, q, come, level, sums, k, values, keys_in, stride, start, stop, first, S, scale, back,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Keys start to stop; keys_in: K as it came, the others in FP8."""
    rows = first + tl.arange(0, ROWS)
    for n in tl.range(start, stop, KEYS):
        n = tl.multiple_of(n, KEYS)
        keys = n + tl.arange(0, KEYS)
        scores = fp8_product(q, whole_tile(k, WIDTH, n, KEYS, WIDTH).T)
        dweights = fp8_product(come, whole_tile(values, WIDTH_V, n, KEYS, WIDTH_V).T)
        if EDGE:
            see = (keys < S)[None, :]
            if CAUSAL:
                see = see & (keys[None, :] <= rows[:, None])
            scores = tl.where(see, scores, float("-inf"))
        weights = exp2(scores * scale - level[:, None], 0)
        dscores = weights * (dweights * back - sums[:, None])
        block = tile(keys_in, stride, n, S, KEYS, WIDTH, D, not EDGE)
        # Awaited here: of two loops in a row the assembler would wait for every product (C7515).
        dq = settled(product(rounded(dscores, block.dtype), block, dq))
    return dq


@triton.jit
def fp8_attention_backward_rows_kernel(
    q, k, values, come, q_inv, k_inv, v_inv, come_inv, keys_in, level, delta, dq,
    k_b, k_h, k_s, dq_b, dq_h, dq_t, pairs, H, T, S, group, near, padded_q, padded_k, scale,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dQ of ROWS rows."""
    blocks = tl.cdiv(T, ROWS)
    order, pair = heavy_first(tl.program_id(0), blocks, pairs, near)
    first = (blocks - 1 - order) * ROWS
    kv = pair // H * (H // group) + pair % H // group
    keys_in += (pair // H).to(tl.int64) * k_b + (pair % H // group).to(tl.int64) * k_h
    k += kv.to(tl.int64) * padded_k * WIDTH
    values += kv.to(tl.int64) * padded_k * WIDTH_V
    own = whole_tile(q + pair.to(tl.int64) * padded_q * WIDTH, WIDTH, first, ROWS, WIDTH)
    back = whole_tile(come + pair.to(tl.int64) * padded_q * WIDTH_V, WIDTH_V, first, ROWS, WIDTH_V)
    rows = pair.to(tl.int64) * padded_q + first + tl.arange(0, ROWS)
    own_level, sums = tl.load(level + rows), tl.load(delta + rows)
    of_scores = positive(tl.load(q_inv + pair) * (scale * LOG2_E) * tl.load(k_inv + kv))
    of_weights = tl.load(come_inv + pair) * tl.load(v_inv + kv)
    end = S
    inner = S // KEYS * KEYS
    if CAUSAL:
        end = tl.minimum(S, first + ROWS)
        inner = tl.minimum(S, first + 1) // KEYS * KEYS
    made = tl.zeros((ROWS, WIDTH), tl.float32)
    made = _row_steps(
        made, own, back, own_level, sums, k, values, keys_in, k_s, 0, inner, first, S, of_scores, of_weights,
        D, ROWS, KEYS, WIDTH, WIDTH_V, CAUSAL, False,
    )  # fmt: skip
    if CAUSAL or not EVEN:
        made = _row_steps(
            made, own, back, own_level, sums, k, values, keys_in, k_s, inner, end, first, S, of_scores, of_weights,
            D, ROWS, KEYS, WIDTH, WIDTH_V, CAUSAL, True,
        )  # fmt: skip
    dq += (pair // H).to(tl.int64) * dq_b + (pair % H).to(tl.int64) * dq_h
    put(dq, dq_t, first, T, rounded(made * scale, dq.dtype.element_ty), ROWS, WIDTH, D)


@triton.jit
def _key_steps(
    dk, dv, k, values, q, come, level, delta, rows_in, back_in, stride, stride_back, start, stop, first, T, scale, back,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    WHOLE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Rows start to stop; rows_in and back_in: Q and dO as they came. Scores are transposed, keys by rows.

    EDGE: some rows come before some keys. Rows beyond T have weights of 0, and keys beyond S are not written.
    """
    keys = first + tl.arange(0, KEYS)
    for m in tl.range(start, stop, ROWS):
        m = tl.multiple_of(m, ROWS)
        rows = m + tl.arange(0, ROWS)
        scores = fp8_product(k, whole_tile(q, WIDTH, m, ROWS, WIDTH).T)
        if EDGE:
            scores = tl.where(keys[:, None] <= rows[None, :], scores, float("-inf"))
        weights = exp2(scores * scale - tl.load(level + rows)[None, :], 0)
        gradient = tile(back_in, stride_back, m, T, ROWS, WIDTH_V, DV, WHOLE)
        dv = product(rounded(weights, gradient.dtype), gradient, dv)
        dweights = fp8_product(values, whole_tile(come, WIDTH_V, m, ROWS, WIDTH_V).T)
        queries = tile(rows_in, stride, m, T, ROWS, WIDTH, D, WHOLE)
        dscores = rounded(weights * (dweights * back - tl.load(delta + rows)[None, :]), queries.dtype)
        dk = settled(product(dscores, queries, dk))
    return dk, dv


@triton.jit
def fp8_attention_backward_keys_kernel(
    q, k, values, come, q_inv, k_inv, v_inv, come_inv, rows_in, back_in, level, delta, dk, dv,
    q_b, q_h, q_t, dout_b, dout_h, dout_t, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    pairs, H, T, S, group, near, padded_q, padded_k, scale,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dK and dV of KEYS keys, over GROUP query heads. pairs: sequences times key heads."""
    order, pair = heavy_first(tl.program_id(0), tl.cdiv(S, KEYS), pairs, near)
    first = order * KEYS  # of causal keys the first are seen the most
    b = (pair // (H // GROUP)).to(tl.int64)
    kv_head = (pair % (H // GROUP)).to(tl.int64)
    at = pair.to(tl.int64) * padded_k
    own = whole_tile(k + at * WIDTH, WIDTH, first, KEYS, WIDTH)
    block = whole_tile(values + at * WIDTH_V, WIDTH_V, first, KEYS, WIDTH_V)
    of_keys = tl.load(k_inv + pair) * (scale * LOG2_E)
    of_values = tl.load(v_inv + pair)
    begin = tl.full((), 0, tl.int32)
    inner = begin
    if CAUSAL:
        begin = tl.minimum(first // ROWS * ROWS, T)
        inner = tl.maximum(begin, tl.minimum(tl.cdiv(first + KEYS - 1, ROWS) * ROWS, tl.cdiv(T, ROWS) * ROWS))
        inner = tl.where(first < T, inner, T)  # keys from T on, no row sees
    dk_tile = tl.zeros((KEYS, WIDTH), tl.float32)
    dv_tile = tl.zeros((KEYS, WIDTH_V), tl.float32)
    for g in range(GROUP):
        h = kv_head * GROUP + g
        head = b * H + h
        of_scores = positive(of_keys * tl.load(q_inv + head))
        of_weights = of_values * tl.load(come_inv + head)
        q_head, come_head = q + head * padded_q * WIDTH, come + head * padded_q * WIDTH_V
        rows_head, back_head = rows_in + b * q_b + h * q_h, back_in + b * dout_b + h * dout_h
        if CAUSAL:
            dk_tile, dv_tile = _key_steps(
                dk_tile, dv_tile, own, block, q_head, come_head, level + head * padded_q, delta + head * padded_q,
                rows_head, back_head, q_t, dout_t, begin, inner, first, T, of_scores, of_weights,
                D, DV, ROWS, KEYS, WIDTH, WIDTH_V, WHOLE, True,
            )  # fmt: skip
        dk_tile, dv_tile = _key_steps(
            dk_tile, dv_tile, own, block, q_head, come_head, level + head * padded_q, delta + head * padded_q,
            rows_head, back_head, q_t, dout_t, inner, T, first, T, of_scores, of_weights,
            D, DV, ROWS, KEYS, WIDTH, WIDTH_V, WHOLE, False,
        )  # fmt: skip
    dk_tile = rounded(dk_tile * scale, dk.dtype.element_ty)
    put(dk + b * dk_b + kv_head * dk_h, dk_s, first, S, dk_tile, KEYS, WIDTH, D)
    put(dv + b * dv_b + kv_head * dv_h, dv_s, first, S, rounded(dv_tile, dv.dtype.element_ty), KEYS, WIDTH_V, DV)


def arriving(dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Heads, Tensor]:
    """dO in FP8 by rows; and (2, B, H, padded T) float32, the rows' levels and deltas. (B, H, T, D), last strides 1."""
    batch, heads, rows, features = dout.shape
    length, wide = padded(rows), width(features)
    info = dout.new_empty(2, batch, heads, length, dtype=torch.float32)
    come = dout.new_empty(batch, heads, length, wide, dtype=E4M3)
    inverse = dout.new_empty(batch, heads, dtype=torch.float32)
    integers = (*row_strides(dout, out), heads, rows, length)
    constants = {"DV": features, "WIDTH": wide, "ROWS": DELTA_ROWS, "num_warps": 4}
    tensors = (dout, out, lse, amax_bits(dout), come, inverse, *info.unbind())
    key = *traits(*tensors), *integers, *constants.values()
    grid = length // DELTA_ROWS * batch * heads
    launch(fp8_attention_delta_kernel, grid, key, dout.get_device(), (*tensors, *integers), constants)
    return Heads(come, None, inverse), info


def backward(
    dout: Tensor, q: Tensor, k: Tensor, out: Tensor, lse: Tensor, heads: tuple[Heads, Heads, Heads], features: int,
    causal: bool, scale: float, of_rows: Tile | None = None, of_keys: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the inputs' dtype; heads: q, k and v in FP8 by rows; features: of v. The last strides are 1."""
    (batch, count, rows, d), (_, kv_count, keys, _) = q.shape, k.shape
    group = count // kv_count
    q8, k8, v8 = heads
    assert q8.data is not None
    assert k8.data is not None
    assert v8.data is not None
    wide, wide_v, padded_q, padded_k = q8.data.shape[3], width(features), padded(rows), padded(keys)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), k.new_empty(*k.shape[:3], features)
    if features == d:
        dv = torch.empty_like(k)
    come, info = arriving(dout, out, lse)
    assert come.data is not None
    level, delta = info.unbind()

    fp8 = (q8.data, k8.data, v8.data, come.data, q8.scale_inv, k8.scale_inv, v8.scale_inv, come.scale_inv)
    device = q.get_device()
    size = of_rows or OF_ROWS[max(wide, wide_v)]
    near = max(1, L2_BYTES // (padded_k * (wide + wide_v + d * k.element_size()))) * group
    tensors: tuple[Tensor, ...] = (*fp8, k, level, delta, dq)
    integers: tuple[int, ...] = (*row_strides(k, dq), batch * count, count, rows, keys, group, near, padded_q, padded_k)
    constants: dict[str, Any] = {
        "D": d, "ROWS": size.rows, "KEYS": size.keys, "WIDTH": wide, "WIDTH_V": wide_v, "CAUSAL": causal,
        "EVEN": keys % size.keys == 0, "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip
    key = *traits(*tensors), *integers, *constants.values()
    grid = triton.cdiv(rows, size.rows) * batch * count
    launch(fp8_attention_backward_rows_kernel, grid, key, device, (*tensors, *integers, float(scale)), constants)

    size = of_keys or OF_KEYS[max(wide, wide_v)]
    near = max(1, L2_BYTES // (padded_q * group * (wide + wide_v + (d + features) * q.element_size())))
    tensors = (*fp8, q, dout, level, delta, dk, dv)
    integers = (*row_strides(q, dout, dk, dv), batch * kv_count, count, rows, keys, group, near, padded_q, padded_k)
    constants = {
        "D": d, "DV": features, "ROWS": size.rows, "KEYS": size.keys, "WIDTH": wide, "WIDTH_V": wide_v, "CAUSAL": causal,
        "WHOLE": rows % size.rows == 0, "GROUP": group, "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip
    key = *traits(*tensors), *integers, *constants.values()
    grid = triton.cdiv(keys, size.keys) * batch * kv_count
    launch(fp8_attention_backward_keys_kernel, grid, key, device, (*tensors, *integers, float(scale)), constants)
    return dq, dk, dv
