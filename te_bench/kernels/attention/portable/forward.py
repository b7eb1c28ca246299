# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The forward kernel of fused attention, and its launcher.

FlashAttention-2's order (Dao, arXiv:2307.08691): a program has a tile of rows and goes over the keys, keeping the maximum,
the sum and the weighted values. The loop is cut in three, so that only blocks that the edge of what is seen crosses look
at indices. Scores are in units of log2(e), so that a weight is one multiplication, one exp2.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.attention.portable.scores import (
    LN_2,
    LOG2_E,
    LOWEST,
    NO_MASK,
    exp2,
    heavy_first,
    kept,
    key_range,
    largest,
    product,
    put,
    seen,
    sequence,
    settled,
    tile,
)
from te_bench.kernels.launch import launch, traits
from te_bench.kernels.tile import rounded

INTERPRETED: bool = triton.knobs.runtime.interpret
L2_BYTES = 40 * 2**20  # of an H200's 50 MB, for keys and values that programs share


class Tile(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int
    emulated: int = 0  # quarters of the exponentials that are computed by multiplications


#: By the wider of the two heads, in half precision. Swept on an H200 (2026-11-21): at D64, B12 H12 T1024 causal, 304 TFLOP/s
#: (128 x 64 by 8 warps 274; cuDNN 293), at D128, B2 H16 T8192, 462 (cuDNN 609); the others by reasoning.
FORWARD: Mapping[int, Tile] = {
    16: Tile(128, 64, 4, 3),
    32: Tile(128, 64, 4, 3),
    64: Tile(64, 64, 4, 3),
    128: Tile(128, 64, 8, 3),
    256: Tile(64, 32, 8, 2),
}


@triton.jit
def _steps(
    acc, total, top, q, k, v, stride_k, stride_v, start, stop, first, T, S, left, right, mask, mask_t, mask_s,
    scale, seed, head, dropout,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, WHOLE: tl.constexpr,
    EMULATED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Keys start to stop, of which all are seen by all rows but where EDGE."""
    rows = first + tl.arange(0, ROWS)
    for n in tl.range(start, stop, KEYS):
        n = tl.multiple_of(n, KEYS)
        block = tile(k, stride_k, n, S, KEYS, WIDTH, D, WHOLE or not EDGE)
        scores = product(q, block.T, tl.zeros((ROWS, KEYS), tl.float32))
        keys = n + tl.arange(0, KEYS)
        if EDGE:
            see = seen(
                rows[:, None], keys[None, :], T, S, left, right, mask, mask_t, mask_s, HAS_LEFT, HAS_RIGHT, MASK, WHOLE
            )
            scores = tl.where(see, scores, float("-inf"))
        higher = tl.maximum(top, largest(scores) * scale, propagate_nan=tl.PropagateNan.ALL)
        weights = exp2(scores * scale - higher[:, None], EMULATED)
        shrink = exp2(top - higher, 0)
        total = total * shrink + tl.sum(weights, 1)
        if DROPOUT:
            weights *= kept(seed, head, first, n, dropout, ROWS, KEYS, False)
        acc = acc * shrink[:, None]
        values = tile(v, stride_v, n, S, KEYS, WIDTH_V, DV, WHOLE or not EDGE)
        acc = product(rounded(weights, values.dtype), values, acc)
        if HAS_LEFT:  # of three loops in a row the assembler would wait for each product (C7515)
            acc = settled(acc)
        top = higher
    return acc, total, top


@triton.jit
def attention_forward_kernel(
    q, k, v, out, lse, mask, seed, starts_q, starts_k,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_t, mask_b, mask_h, mask_t, mask_s,
    batch, H, T, S, group, near, left, right, scale, dropout, total_rows,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, WHOLE: tl.constexpr,
    EMULATED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """out and lse of ROWS rows. WHOLE: S is a multiple of KEYS and T one of ROWS.

    PACKED: `batch` sequences one after the other, of at most T rows and S keys, begin at starts_q and starts_k.
    """
    blocks = tl.cdiv(T, ROWS)
    order, pair = heavy_first(tl.program_id(0), blocks, batch * H, near)
    first = (blocks - 1 - order) * ROWS  # of causal rows the last see the most
    b = (pair // H).to(tl.int64)
    h = (pair % H).to(tl.int64)
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    mask_bh = mask
    if MASK != NO_MASK:
        mask_bh = mask + b * mask_b + h * mask_h
    if PACKED:
        begin_q, T = sequence(starts_q, b)
        begin_k, S = sequence(starts_k, b)
        S = tl.where(first < T, S, 0)  # a shorter sequence has fewer blocks than the longest
        q += begin_q.to(tl.int64) * q_t
        k += begin_k.to(tl.int64) * k_s
        v += begin_k.to(tl.int64) * v_s
        out += begin_q.to(tl.int64) * out_t
        lse += h * total_rows + begin_q
    own = tile(q + b * q_b + h * q_h, q_t, first, T, ROWS, WIDTH, D, WHOLE)

    begin, inner, outer, end = key_range(first, S, left, right, ROWS, KEYS, HAS_LEFT, HAS_RIGHT, MASK)
    scale *= LOG2_E
    acc = tl.zeros((ROWS, WIDTH_V), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), LOWEST, tl.float32)  # finite: where a row has seen but -inf, -inf - -inf would be NaN
    if HAS_LEFT:
        acc, total, top = _steps(
            acc, total, top, own, k, v, k_s, v_s, begin, inner, first, T, S, left, right, mask_bh, mask_t, mask_s,
            scale, seed, pair, dropout,
            D, DV, ROWS, KEYS, WIDTH, WIDTH_V, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, WHOLE, EMULATED, True,
        )  # fmt: skip
    if MASK == NO_MASK:
        acc, total, top = _steps(
            acc, total, top, own, k, v, k_s, v_s, inner, outer, first, T, S, left, right, mask_bh, mask_t, mask_s,
            scale, seed, pair, dropout,
            D, DV, ROWS, KEYS, WIDTH, WIDTH_V, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, WHOLE, EMULATED, False,
        )  # fmt: skip
    if HAS_RIGHT or MASK != NO_MASK or not WHOLE:
        acc, total, top = _steps(
            acc, total, top, own, k, v, k_s, v_s, outer, end, first, T, S, left, right, mask_bh, mask_t, mask_s,
            scale, seed, pair, dropout,
            D, DV, ROWS, KEYS, WIDTH, WIDTH_V, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, WHOLE, EMULATED, True,
        )  # fmt: skip

    if (
        not HAS_LEFT and MASK == NO_MASK
    ):  # all rows see a key, if there is one: a sum of 0 is of scores that are all -inf
        total = tl.where((total == 0.0) & (S > 0), float("nan"), total)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)  # a row that sees no key is 0
    rows = first + tl.arange(0, ROWS)
    if PACKED:
        tl.store(lse + rows, (top + tl.log2(total)) * LN_2, mask=rows < T)
    else:
        tl.store(lse + pair.to(tl.int64) * T + rows, (top + tl.log2(total)) * LN_2, mask=rows < T)
    result = rounded(acc * share[:, None], out.dtype.element_ty)
    put(out + b * out_b + h * out_h, out_t, first, T, result, ROWS, WIDTH_V, DV)


class Extent(NamedTuple):
    """What is seen, by row i: keys i - left to i + right, -1 for no end, where the mask is not 1."""

    left: int
    right: int
    mask: Tensor | None  # uint8, (B, H, T, S), most often expanded

    def kind(self) -> int:
        if self.mask is None:
            return 0
        return 1 if self.mask.stride(2) == 0 else 2

    def strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.mask is None else self.mask.stride()

    def constants(self) -> dict[str, Any]:
        return {"HAS_LEFT": self.left >= 0, "HAS_RIGHT": self.right >= 0, "MASK": self.kind()}


class Packed(NamedTuple):
    """Sequences one after the other in q (1, H, total, D), k and v: where each begins, and the lengths of the longest."""

    starts_q: Tensor  # (sequences + 1,), int32 or int64
    starts_k: Tensor
    rows: int
    keys: int


def widths(q: Tensor, v: Tensor) -> dict[str, int]:
    """The heads' widths, and those of their tiles, powers of two of at least the 16 that tensor cores take."""
    d, dv = q.shape[-1], v.shape[-1]
    return {
        "D": d,
        "DV": dv,
        "WIDTH": max(16, triton.next_power_of_2(d)),
        "WIDTH_V": max(16, triton.next_power_of_2(dv)),
    }


def chosen(table: Mapping[int, Tile], sizes: Mapping[str, Any]) -> Tile:
    return table[max(sizes["WIDTH"], sizes["WIDTH_V"])]


def together(k: Tensor, v: Tensor, group: int, keys: int | None = None) -> int:
    """How many query heads' keys and values fit in the L2, of `keys` keys, by default all."""
    bytes_a_head = (k.shape[-1] + v.shape[-1]) * (k.shape[2] if keys is None else keys) * k.element_size()
    return max(1, L2_BYTES // max(1, bytes_a_head)) * group


def row_strides(*tensors: Tensor) -> tuple[int, ...]:
    """(batch, head, row) strides of each; a batch of one, which packed sequences are, has stride 0."""
    return tuple(stride for x in tensors for stride in (x.stride(0) if x.shape[0] > 1 else 0, *x.stride()[1:3]))


def counts(q: Tensor, k: Tensor, packed: Packed | None) -> tuple[int, int, int, int, int]:
    """Sequences, heads, rows and keys (of the longest), query heads a key head."""
    if packed is None:
        return q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    return len(packed.starts_q) - 1, q.shape[1], packed.rows, packed.keys, q.shape[1] // k.shape[1]


def starts_of(packed: Packed | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if packed is None else (packed.starts_q, packed.starts_k)


def forward(
    q: Tensor, k: Tensor, v: Tensor, extent: Extent, scale: float, dropout: float, seed: Tensor | None,
    given: Tile | None = None, packed: Packed | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, H, T, Dv) in q's dtype, in the memory order (B, T, H, Dv), and lse (B, H, T) float32, natural logarithms.

    The last strides are 1. seed (2,) int64, where dropout > 0: the generator's key and one word of its counter.
    """
    batch, heads, rows, keys, group = counts(q, k, packed)
    sizes = widths(q, v)
    size = given or chosen(FORWARD, sizes)
    out = q.new_empty(q.shape[0], q.shape[2], heads, sizes["DV"]).transpose(1, 2)
    lse = q.new_empty(q.shape[0], heads, q.shape[2], dtype=torch.float32)
    if packed is not None:  # what is of no sequence
        out.zero_()
        lse.fill_(float("-inf"))
    integers = (
        *row_strides(q, k, v, out), *extent.strides(), batch, heads, rows, keys, group, together(k, v, group, keys),
        extent.left, extent.right,
    )  # fmt: skip
    constants = {
        **sizes, "ROWS": size.rows, "KEYS": size.keys, **extent.constants(), "DROPOUT": dropout > 0,
        "WHOLE": packed is None and rows % size.rows == 0 and keys % size.keys == 0, "EMULATED": size.emulated,
        "PACKED": packed is not None, "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip
    tensors = (q, k, v, out, lse, extent.mask, seed, *starts_of(packed))
    key = (*traits(*tensors), *integers, q.shape[2], *constants.values())
    grid = triton.cdiv(rows, size.rows) * batch * heads
    launch(
        attention_forward_kernel,
        grid,
        key,
        q.get_device(),
        (*tensors, *integers, float(scale), float(dropout), q.shape[2]),
        constants,
    )
    return out, lse
