# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The forward kernel of FP8 attention, and its launcher: `_kernels`' order with both products in E4M3.

What `manual_fp8` says, block of keys by block: 2^8 P of the maximum so far is rounded to E4M3. Each block's product with the
values is added to the others in float32: the FP8 tensor core's own sums have 14 bits, and over 16384 keys that shows.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.attention.fp8_quantize import BLOCK, PADDED_ROWS, Heads, padded, positive
from te_bench.kernels.attention.portable.forward import L2_BYTES, row_strides
from te_bench.kernels.attention.portable.scores import LN_2, LOG2_E, exp2, heavy_first, largest, put
from te_bench.kernels.launch import launch, traits
from te_bench.kernels.tile import INTERPRETED, rounded, to_fp8

OFFSET = tl.constexpr(8.0)  # P is rounded as 2^8 P: manual_fp8.WEIGHTS


class Plan(NamedTuple):
    """How a program of the forward pass works."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # a thread's at most, so that one more program fits on a processor
    halves: int = 1  # of the values' features: P V a half at a time keeps a half's product in registers


#: By the wider of the two heads. Swept on an H200 at T1024 and 8192 of D64, T2048 to 16384 of D128
#: (benchmarks/attention_fp8_tiles.py, docs/attention.md); 32 was not.
FORWARD: Mapping[int, Plan] = {
    32: Plan(64, 128, 4, 2, 128),
    64: Plan(64, 128, 4, 2, 128),
    128: Plan(64, 128, 4, 2, 168, halves=2),
}


@triton.jit
def fp8_product(a, b):
    """a b in float32 of FP8 operands; by itself, not added to what there is."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def whole_tile(base, stride, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows first to first + ROWS of what is padded to whole tiles."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    return tl.load(base + first.to(tl.int64) * stride + rows[:, None] * stride + columns[None, :])


@triton.jit
def slotted(weights, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Columns in the order of `in_slots`, in which the values come."""
    apart = tl.reshape(weights, (ROWS, KEYS // 16, 2, 4, 2))
    return tl.reshape(tl.permute(apart, (0, 1, 3, 2, 4)), (ROWS, KEYS))


@triton.jit
def until(last, KEYS: tl.constexpr):
    """Which of KEYS keys are no later than last, a number for each row or for all.

    In eights of keys: the numbers that differ by thread are then few, and keep few registers.
    """
    left = last[:, None] - tl.arange(0, 8)[None, :]
    see = (8 * tl.arange(0, KEYS // 8))[None, :, None] <= left[:, None, :]
    return tl.reshape(see, (last.shape[0], KEYS))


@triton.jit
def _steps(
    acc, other, total, top, q, k, values, start, stop, last, scale, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, HALVES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Keys start to stop, of which all are seen by all rows, or where EDGE each row's first to last; values are transposed.

    other: the second half of the features' acc, where HALVES is 2.
    """
    features = tl.arange(0, WIDTH_V // HALVES)
    keys = tl.arange(0, KEYS)
    for n in tl.range(start, stop, KEYS):
        n = tl.multiple_of(n, KEYS)
        scores = fp8_product(q, whole_tile(k, WIDTH, n, KEYS, WIDTH).T)
        if EDGE:
            scores = tl.where(until(last - n, KEYS), scores, float("-inf"))
        higher = tl.maximum(top, largest(scores) * scale, propagate_nan=tl.PropagateNan.ALL)
        weights = exp2(scores * scale - (higher - OFFSET)[:, None], 0)
        shrink = exp2(top - higher, 0)
        total = total * shrink + tl.sum(weights, 1)
        operand = to_fp8(slotted(weights, ROWS, KEYS), tl.float8e4nv)
        if KEYS == BLOCK:
            at = values + n.to(tl.int64) * WIDTH_V
        else:
            at = values + tl.multiple_of((n // BLOCK).to(tl.int64) * (BLOCK * WIDTH_V) + n % BLOCK, KEYS)
        block = tl.load(at + features[:, None] * BLOCK + keys[None, :])
        acc = acc * shrink[:, None] + fp8_product(operand, block.T)
        if HALVES == 2:
            block = tl.load(at + (WIDTH_V // 2 + features)[:, None] * BLOCK + keys[None, :])
            other = other * shrink[:, None] + fp8_product(operand, block.T)
        top = higher
    return acc, other, total, top


@triton.jit(do_not_specialize=PADDED_ROWS)
def fp8_attention_forward_kernel(
    q, k, values, q_inv, k_inv, v_inv, out, lse, out_b, out_h, out_t, pairs, H, T, S, group, near, padded_q, padded_k, scale,
    DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """out and lse of ROWS rows. q (B, H, padded_q, WIDTH), k and the values (B, Hkv, ...) in E4M3. EVEN: S % KEYS is 0."""
    tl.static_assert(BLOCK % KEYS == 0)
    blocks = tl.cdiv(T, ROWS)
    order, pair = heavy_first(tl.program_id(0), blocks, pairs, near)
    first = (blocks - 1 - order) * ROWS  # of causal rows the last see the most
    kv = pair // H * (H // group) + pair % H // group
    k += kv.to(tl.int64) * padded_k * WIDTH
    values += kv.to(tl.int64) * padded_k * WIDTH_V
    own = whole_tile(q + pair.to(tl.int64) * padded_q * WIDTH, WIDTH, first, ROWS, WIDTH)
    scale = positive(tl.load(q_inv + pair) * (scale * LOG2_E) * tl.load(k_inv + kv))
    rows = first + tl.arange(0, ROWS)
    end = S
    inner = S // KEYS * KEYS
    last = tl.full((1,), S - 1, tl.int32)
    if CAUSAL:
        end = tl.minimum(S, first + ROWS)
        inner = tl.minimum(S, first + 1) // KEYS * KEYS
        last = tl.minimum(rows, S - 1)
    acc = tl.zeros((ROWS, WIDTH_V // HALVES), tl.float32)
    other = acc
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    acc, other, total, top = _steps(
        acc, other, total, top, own, k, values, 0, inner, last, scale, ROWS, KEYS, WIDTH, WIDTH_V, HALVES, False
    )  # fmt: skip
    if CAUSAL or not EVEN:
        acc, other, total, top = _steps(
            acc, other, total, top, own, k, values, inner, end, last, scale, ROWS, KEYS, WIDTH, WIDTH_V, HALVES, True
        )  # fmt: skip
    tl.store(lse + pair.to(tl.int64) * T + rows, (top - OFFSET + tl.log2(total)) * LN_2, mask=rows < T)
    out += (pair // H).to(tl.int64) * out_b + (pair % H).to(tl.int64) * out_h
    by = (tl.load(v_inv + kv) / total)[:, None]
    HALF: tl.constexpr = WIDTH_V // HALVES
    put(out, out_t, first, T, rounded(acc * by, out.dtype.element_ty), ROWS, HALF, DV if DV < HALF else HALF)
    if HALVES == 2 and DV > HALF:
        put(out + HALF, out_t, first, T, rounded(other * by, out.dtype.element_ty), ROWS, HALF, DV - HALF)


def forward(
    q: Heads, k: Heads, v: Heads, lengths: tuple[int, int], features: int, dtype: torch.dtype, causal: bool, scale: float,
    given: Plan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, H, T, features) of dtype, in the memory order (B, T, H, features), and lse (B, H, T) float32.

    lengths: T and S, neither 0; q and k by rows, v transposed.
    """
    assert q.data is not None
    assert k.data is not None
    assert v.data_t is not None
    (rows, keys), (batch, heads, padded_q, wide) = lengths, q.data.shape
    (kv_heads, padded_k), wide_v = k.data.shape[1:3], v.data_t.shape[3]
    group, size = heads // kv_heads, given or FORWARD[max(wide, wide_v)]
    assert padded_q == padded(rows)
    out = torch.empty(batch, rows, heads, features, dtype=dtype, device=q.data.device).transpose(1, 2)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.data.device)
    near = max(1, L2_BYTES // (padded_k * (wide + wide_v))) * group
    integers = *row_strides(out), batch * heads, heads, rows, keys, group, near, padded_q, padded_k
    constants: dict[str, Any] = {
        "DV": features, "ROWS": size.rows, "KEYS": size.keys, "WIDTH": wide, "WIDTH_V": wide_v, "CAUSAL": causal,
        "EVEN": keys % size.keys == 0, "HALVES": size.halves, "num_warps": size.warps, "num_stages": size.stages,
        "maxnreg": size.registers,
    }  # fmt: skip
    tensors = (q.data, k.data, v.data_t, q.scale_inv, k.scale_inv, v.scale_inv, out, lse)
    key = (*traits(*tensors), *integers, *constants.values())
    grid = triton.cdiv(rows, size.rows) * batch * heads
    launch(fp8_attention_forward_kernel, grid, key, out.get_device(), (*tensors, *integers, float(scale)), constants)
    return out, lse
