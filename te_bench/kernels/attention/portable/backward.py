# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The backward kernels of fused attention, and their launcher.

With P the weights, dP = dO V^T, delta the rows' sums of out * dO and dS = P (dP - delta): dV = P^T dO, dK = scale dS^T Q,
dQ = scale dS K. Two ways: a program has a tile of rows and makes dQ, then one has a tile of keys and makes dK and dV, seven
products; or the second makes dQ too, five products, and adds its share to a float32 dQ by atomics, in no fixed order.
Source: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.attention.portable.forward import (
    Extent,
    Packed,
    Tile,
    chosen,
    counts,
    row_strides,
    starts_of,
    together,
    widths,
)
from te_bench.kernels.attention.portable.scores import (
    LOG2_E,
    NO_MASK,
    exp2,
    heavy_first,
    kept,
    key_range,
    product,
    put,
    row_range,
    seen,
    sequence,
    settled,
    tile,
)
from te_bench.kernels.launch import launch, traits
from te_bench.kernels.tile import rounded

#: By the wider of the two heads, in half precision: rows and keys of a tile, as the names say, in each pass.
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
#: The same where random numbers, or the loop over query heads, take registers that a smaller tile would spill.
OF_KEYS_CROWDED: Mapping[int, Tile] = {**OF_KEYS, 64: Tile(64, 128, 8, 3)}
#: And where the lengths of packed sequences take some as well, beside the loop over query heads.
OF_KEYS_PACKED: Mapping[int, Tile] = {**OF_KEYS, 64: Tile(32, 128, 8, 2), 128: Tile(16, 128, 8, 2)}
FUSED: Mapping[int, Tile] = {64: Tile(64, 128, 8, 3)}  # all three
#: Where one pass is faster than two: nowhere on an H200 (at D64, B12 H12 T1024 causal, 198 TFLOP/s against 229).
FASTER_FUSED: frozenset[int] = frozenset()
DELTA_ROWS = 64


@triton.jit
def _row_sums(out, dout, stride_out, stride_dout, lse, level, delta, pair, first, T, padded,
              DV: tl.constexpr, ROWS: tl.constexpr, WIDTH_V: tl.constexpr, WHOLE: tl.constexpr,
              PACKED: tl.constexpr):  # fmt: skip
    """dO, level and delta of ROWS rows, the latter two written for the pass over the keys.

    level: the logarithm, to base 2, of the rows' sums; infinity, whose weights are 0, for rows that see no key or are none.
    """
    rows = first + tl.arange(0, ROWS)
    come = tile(dout, stride_dout, first, T, ROWS, WIDTH_V, DV, WHOLE)
    made = tile(out, stride_out, first, T, ROWS, WIDTH_V, DV, WHOLE)
    sums = tl.sum(made.to(tl.float32) * come.to(tl.float32), 1)
    tl.store(delta + pair.to(tl.int64) * padded + rows, sums)
    if PACKED:  # lse begins with the sequence
        value = tl.load(lse + rows, mask=rows < T, other=float("inf"))
    else:
        value = tl.load(lse + pair.to(tl.int64) * T + rows, mask=rows < T, other=float("inf"))
    value = tl.where(value == float("-inf"), float("inf"), value) * LOG2_E
    tl.store(level + pair.to(tl.int64) * padded + rows, value)
    return come, value, sums


@triton.jit
def attention_delta_kernel(
    out, dout, lse, level, delta, dq, out_b, out_h, out_t, dout_b, dout_h, dout_t, H, T, padded,
    DV: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """level and delta of ROWS rows, and zeros in dq."""
    pair = tl.program_id(0) // (padded // ROWS)
    first = tl.program_id(0) % (padded // ROWS) * ROWS
    b = (pair // H).to(tl.int64)
    h = (pair % H).to(tl.int64)
    _row_sums(
        out + b * out_b + h * out_h, dout + b * dout_b + h * dout_h, out_t, dout_t, lse, level, delta, pair, first, T,
        padded, DV, ROWS, WIDTH_V, False, False,
    )  # fmt: skip
    at = dq + (pair.to(tl.int64) * padded + first) * WIDTH
    at += tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(at, tl.zeros((ROWS, WIDTH), tl.float32))


@triton.jit
def _row_steps(
    dq, q, dout, level, delta, k, v, stride_k, stride_v, start, stop, first, T, S, left, right, mask, mask_t, mask_s,
    scale, seed, head, dropout,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, WHOLE: tl.constexpr,
    EMULATED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    rows = first + tl.arange(0, ROWS)
    for n in tl.range(start, stop, KEYS):
        n = tl.multiple_of(n, KEYS)
        block = tile(k, stride_k, n, S, KEYS, WIDTH, D, WHOLE or not EDGE)
        values = tile(v, stride_v, n, S, KEYS, WIDTH_V, DV, WHOLE or not EDGE)
        scores = product(q, block.T, tl.zeros((ROWS, KEYS), tl.float32))
        dweights = product(dout, values.T, tl.zeros((ROWS, KEYS), tl.float32))
        keys = n + tl.arange(0, KEYS)
        if EDGE:
            see = seen(
                rows[:, None], keys[None, :], T, S, left, right, mask, mask_t, mask_s, HAS_LEFT, HAS_RIGHT, MASK, WHOLE
            )
            scores = tl.where(see, scores, float("-inf"))
        weights = exp2(scores * scale - level[:, None], EMULATED)
        if DROPOUT:
            dweights *= kept(seed, head, first, n, dropout, ROWS, KEYS, False)
        dscores = weights * (dweights - delta[:, None])
        dq = product(rounded(dscores, block.dtype), block, dq)
        if HAS_LEFT:  # as in the forward pass
            dq = settled(dq)
    return dq


@triton.jit
def attention_backward_rows_kernel(
    q, k, v, dout, out, lse, level, delta, dq, mask, seed, starts_q, starts_k,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, dout_b, dout_h, dout_t, out_b, out_h, out_t, dq_b, dq_h, dq_t,
    mask_b, mask_h, mask_t, mask_s, batch, H, T, S, group, near, padded, left, right, scale, dropout, total_rows,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WHOLE: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """dQ, level and delta of ROWS rows. PACKED: as in the forward pass."""
    blocks = padded // ROWS
    order, pair = heavy_first(tl.program_id(0), blocks, batch * H, near)
    first = (blocks - 1 - order) * ROWS
    b = (pair // H).to(tl.int64)
    h = (pair % H).to(tl.int64)
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    if MASK != NO_MASK:
        mask += b * mask_b + h * mask_h
    if PACKED:
        begin_q, T = sequence(starts_q, b)
        begin_k, S = sequence(starts_k, b)
        S = tl.where(first < T, S, 0)
        q += begin_q.to(tl.int64) * q_t
        dout += begin_q.to(tl.int64) * dout_t
        out += begin_q.to(tl.int64) * out_t
        dq += begin_q.to(tl.int64) * dq_t
        k += begin_k.to(tl.int64) * k_s
        v += begin_k.to(tl.int64) * v_s
        lse += h * total_rows + begin_q
    come, own_level, sums = _row_sums(
        out + b * out_b + h * out_h, dout + b * dout_b + h * dout_h, out_t, dout_t, lse, level, delta, pair, first, T,
        padded, DV, ROWS, WIDTH_V, WHOLE, PACKED,
    )  # fmt: skip
    own = tile(q + b * q_b + h * q_h, q_t, first, T, ROWS, WIDTH, D, WHOLE)
    begin, inner, outer, end = key_range(first, S, left, right, ROWS, KEYS, HAS_LEFT, HAS_RIGHT, MASK)
    dq_tile = tl.zeros((ROWS, WIDTH), tl.float32)
    if HAS_LEFT:
        dq_tile = _row_steps(
            dq_tile, own, come, own_level, sums, k, v, k_s, v_s, begin, inner, first, T, S, left, right, mask,
            mask_t, mask_s, scale * LOG2_E, seed, pair, dropout, D, DV, ROWS, KEYS, WIDTH, WIDTH_V,
            HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, WHOLE, EMULATED, True,
        )  # fmt: skip
    if MASK == NO_MASK:
        dq_tile = _row_steps(
            dq_tile, own, come, own_level, sums, k, v, k_s, v_s, inner, outer, first, T, S, left, right, mask,
            mask_t, mask_s, scale * LOG2_E, seed, pair, dropout, D, DV, ROWS, KEYS, WIDTH, WIDTH_V,
            HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, WHOLE, EMULATED, False,
        )  # fmt: skip
    if HAS_RIGHT or MASK != NO_MASK or not WHOLE:
        dq_tile = _row_steps(
            dq_tile, own, come, own_level, sums, k, v, k_s, v_s, outer, end, first, T, S, left, right, mask,
            mask_t, mask_s, scale * LOG2_E, seed, pair, dropout, D, DV, ROWS, KEYS, WIDTH, WIDTH_V,
            HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, WHOLE, EMULATED, True,
        )  # fmt: skip
    result = rounded(dq_tile * scale, dq.dtype.element_ty)
    put(dq + b * dq_b + h * dq_h, dq_t, first, T, result, ROWS, WIDTH, D)


@triton.jit
def _key_steps(
    dk, dv, k, v, q, dout, level, delta, dq, stride_q, stride_dout, begin, inner, outer, end,
    first, T, S, left, right, mask, mask_t, mask_s, scale, seed, head, dropout,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, WHOLE: tl.constexpr,
    EMULATED: tl.constexpr, FUSED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dk and dv with the share of rows inner to outer; EDGE: begin to inner and outer to end, which alone go beyond T.

    Scores and weights are transposed, keys by rows, so that those of dV and dK go from register to tensor core.
    """
    TAIL: tl.constexpr = EDGE and not WHOLE
    keys = first + tl.arange(0, KEYS)
    if EDGE:
        start, stop = begin, inner + end - outer
    else:
        start, stop = inner, outer
    for at in tl.range(start, stop, ROWS):
        m = at
        if EDGE and (HAS_LEFT or not WHOLE):
            m = tl.where(at < inner, at, at + outer - inner)
        m = tl.multiple_of(m, ROWS)
        queries = tile(q, stride_q, m, T, ROWS, WIDTH, D, not TAIL)
        rows = m + tl.arange(0, ROWS)
        scores = product(k, queries.T, tl.zeros((KEYS, ROWS), tl.float32))
        if EDGE or MASK != NO_MASK:
            see = seen(
                rows[None, :], keys[:, None], T, S, left, right, mask, mask_t, mask_s, HAS_LEFT, HAS_RIGHT, MASK, WHOLE
            )
            if TAIL:  # where a row of zeros times a key that holds an infinity is NaN
                see = see & (rows < T)[None, :]
            scores = tl.where(see, scores, float("-inf"))
        weights = exp2(scores * scale - tl.load(level + rows)[None, :], EMULATED)
        come = tile(dout, stride_dout, m, T, ROWS, WIDTH_V, DV, not TAIL)
        if DROPOUT:
            stays = kept(seed, head, m, first, dropout, ROWS, KEYS, True)
            dv = product(rounded(weights * stays, come.dtype), come, dv)
        else:
            dv = product(rounded(weights, come.dtype), come, dv)
        sums = tl.load(delta + rows)
        dweights = product(v, come.T, tl.zeros((KEYS, ROWS), tl.float32))
        if DROPOUT:
            dweights *= stays
        dscores = rounded(weights * (dweights - sums[None, :]), queries.dtype)
        dk = product(dscores, queries, dk)
        if not FUSED:
            dk = settled(dk)
        if FUSED:
            share = product(dscores.T, k, tl.zeros((ROWS, WIDTH), tl.float32))
            into = dq + m.to(tl.int64) * WIDTH + tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            tl.atomic_add(into, share, sem="relaxed")
    return dk, dv


@triton.jit
def attention_backward_keys_kernel(
    q, k, v, dout, level, delta, dq, dk, dv, mask, seed, starts_q, starts_k,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, dout_b, dout_h, dout_t, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    mask_b, mask_h, mask_t, mask_s, batch, H, T, S, group, near, padded, left, right, scale, dropout,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr, EMULATED: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """dK and dV of KEYS keys, over GROUP query heads; where FUSED their share of dq (B, H, padded, WIDTH), not scaled."""
    order, pair = heavy_first(tl.program_id(0), tl.cdiv(S, KEYS), batch * (H // GROUP), near)
    first = order * KEYS  # of causal keys the first are seen the most
    b = (pair // (H // GROUP)).to(tl.int64)
    kv_head = (pair % (H // GROUP)).to(tl.int64)
    if PACKED:
        begin_q, T = sequence(starts_q, b)
        begin_k, S = sequence(starts_k, b)
        T = tl.where(first < S, T, 0)
        q += begin_q.to(tl.int64) * q_t
        dout += begin_q.to(tl.int64) * dout_t
        k += begin_k.to(tl.int64) * k_s
        v += begin_k.to(tl.int64) * v_s
        dk += begin_k.to(tl.int64) * dk_s
        dv += begin_k.to(tl.int64) * dv_s
    own = tile(k + b * k_b + kv_head * k_h, k_s, first, S, KEYS, WIDTH, D, WHOLE)
    values = tile(v + b * v_b + kv_head * v_h, v_s, first, S, KEYS, WIDTH_V, DV, WHOLE)
    begin, inner, outer, end = row_range(first, T, S, left, right, ROWS, KEYS, HAS_LEFT, HAS_RIGHT, MASK)
    dk_tile = tl.zeros((KEYS, WIDTH), tl.float32)
    dv_tile = tl.zeros((KEYS, WIDTH_V), tl.float32)
    for g in range(GROUP):
        h = kv_head * GROUP + g
        head = (b * H + h).to(tl.int32)
        q_h0 = q + b * q_b + h * q_h
        dout_h0 = dout + b * dout_b + h * dout_h
        level_h0 = level + head.to(tl.int64) * padded
        delta_h0 = delta + head.to(tl.int64) * padded
        dq_h0 = dq
        if FUSED:
            dq_h0 = dq + head.to(tl.int64) * padded * WIDTH
        mask_h0 = mask
        if MASK != NO_MASK:
            mask_h0 = mask + b * mask_b + h * mask_h
        if (MASK == NO_MASK and (HAS_LEFT or HAS_RIGHT)) or not WHOLE:
            dk_tile, dv_tile = _key_steps(
                dk_tile, dv_tile, own, values, q_h0, dout_h0, level_h0, delta_h0, dq_h0, q_t, dout_t, begin, inner, outer,
                end, first, T, S, left, right, mask_h0, mask_t, mask_s, scale * LOG2_E, seed, head, dropout, D, DV, ROWS,
                KEYS, WIDTH, WIDTH_V, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, WHOLE, EMULATED, FUSED, True,
            )  # fmt: skip
        dk_tile, dv_tile = _key_steps(
            dk_tile, dv_tile, own, values, q_h0, dout_h0, level_h0, delta_h0, dq_h0, q_t, dout_t, begin, inner, outer, end,
            first, T, S, left, right, mask_h0, mask_t, mask_s, scale * LOG2_E, seed, head, dropout, D, DV, ROWS, KEYS,
            WIDTH, WIDTH_V, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, WHOLE, EMULATED, FUSED, False,
        )  # fmt: skip
    dk_tile = rounded(dk_tile * scale, dk.dtype.element_ty)
    put(dk + b * dk_b + kv_head * dk_h, dk_s, first, S, dk_tile, KEYS, WIDTH, D)
    put(dv + b * dv_b + kv_head * dv_h, dv_s, first, S, rounded(dv_tile, dv.dtype.element_ty), KEYS, WIDTH_V, DV)


def _sized(size: Tile, rows: int, keys: int, alike: bool) -> dict[str, Any]:
    """The tile's constants, WHOLE among them where all sequences are of the same length."""
    return {
        "ROWS": size.rows, "KEYS": size.keys, "WHOLE": alike and rows % size.rows == 0 and keys % size.keys == 0,
        "EMULATED": size.emulated, "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip


def backward(
    extent: Extent, scale: float, dropout: float, deterministic: bool, dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, seed: Tensor | None, of_rows: Tile | None = None, of_keys: Tile | None = None,
    fused: bool | None = None, packed: Packed | None = None, gradients: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the inputs' dtype and order in memory; extent to dropout, seed and packed are the forward pass's.

    gradients: memory for them, of sequences that are not packed.
    """
    shape = counts(q, k, packed)
    batch, heads, rows, keys, group = shape
    common = {**widths(q, v), **extent.constants(), "DROPOUT": dropout > 0, "PACKED": packed is not None}
    width = common["WIDTH"]
    if fused is None:
        # Random numbers and the loop over query heads leave too few registers for a third product's accumulator.
        fused = (
            not (deterministic or dropout or packed) and group == 1 and max(width, common["WIDTH_V"]) in FASTER_FUSED
        )
    apart = OF_KEYS_CROWDED if dropout or group > 1 else OF_KEYS
    apart = OF_KEYS_PACKED if packed and group > 1 else apart
    of_keys = of_keys or chosen(FUSED if fused else apart, common)
    of_rows = of_rows or chosen(OF_ROWS, common)
    block = max(of_keys.rows, DELTA_ROWS if fused else of_rows.rows)
    padded = triton.cdiv(rows, block) * block
    # A tile of rows beyond the last one is only read behind a mask, which there is none of where tiles divide the rows.
    assert packed or fused or padded - rows < of_rows.rows or rows % of_rows.rows, (
        f"tiles {of_rows}, {of_keys} of {rows} rows"
    )
    made = torch.empty_like if packed is None else torch.zeros_like  # what is of no sequence is 0
    dq, dk, dv = gradients or (made(q), made(k), made(v))
    level, delta = q.new_empty(2, batch, heads, padded, dtype=torch.float32).unbind()
    dq_sum = q.new_empty(batch, heads, padded, width, dtype=torch.float32) if fused else None
    floats = float(scale), float(dropout)
    starts = starts_of(packed)
    if fused:
        constants = {name: common[name] for name in ("DV", "WIDTH", "WIDTH_V")}
        _run(
            attention_delta_kernel, padded // DELTA_ROWS * batch * heads, (out, dout, lse, level, delta, dq_sum),
            (*row_strides(out, dout), heads, rows, padded), (), {"ROWS": DELTA_ROWS, **constants, "num_warps": 4},
        )  # fmt: skip
    else:
        strides = *row_strides(q, k, v, dout, out, dq), *extent.strides()
        _run(
            attention_backward_rows_kernel, padded // of_rows.rows * batch * heads,
            (q, k, v, dout, out, lse, level, delta, dq, extent.mask, seed, *starts),
            (*strides, *shape, together(k, v, group, keys), padded, extent.left, extent.right), floats,
            common | _sized(of_rows, rows, keys, packed is None), q.shape[2],
        )  # fmt: skip
    strides = *row_strides(q, k, v, dout, dk, dv), *extent.strides()
    near = max(1, together(q, dout, 1, rows) // group)
    _run(
        attention_backward_keys_kernel, triton.cdiv(keys, of_keys.keys) * batch * k.shape[1],
        (q, k, v, dout, level, delta, dq_sum, dk, dv, extent.mask, seed, *starts),
        (*strides, *shape, near, padded, extent.left, extent.right), floats,
        common | _sized(of_keys, rows, keys, packed is None) | {"GROUP": group, "FUSED": fused},
    )  # fmt: skip
    if dq_sum is not None:
        torch.mul(dq_sum[:, :, :rows, : q.shape[-1]], scale, out=dq)
    return dq, dk, dv


def _run(
    kernel: Any, grid: int, tensors: tuple[Tensor | None, ...], integers: tuple[int, ...], floats: tuple[float, ...],
    constants: dict[str, Any], *last: int,
) -> None:  # fmt: skip
    key = (*traits(*tensors), *integers, *last, *constants.values())
    device = next(t for t in tensors if t is not None).get_device()
    launch(kernel, grid, key, device, (*tensors, *integers, *floats, *last), constants)
