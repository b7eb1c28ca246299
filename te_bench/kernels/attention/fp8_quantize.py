# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The quantiser of FP8 attention: E4M3, one scale a head, by rows, transposed or both; one launch for q, k and v.

FP8 tensor cores read operands whose contracted dimension is contiguous: Q, K and dO by rows, V transposed for O = P V
and by rows for dP = dO V^T. Both layouts are zero-padded to whole tiles, so kernels need no edge checks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.attention.portable.launch import row_strides, run
from te_bench.kernels.attention.portable.scores import load_tile
from te_bench.kernels.quantize.kernels import inverse_of, scale_of
from te_bench.kernels.tile import larger, magnitude, to_fp8

E4M3 = torch.float8_e4m3fn
PADDED = 128  # rows and keys are padded to multiples of this, the largest tile
BLOCK = tl.constexpr(PADDED)
LEAST_WIDTH = 32  # of the contracted dimension of FP8 tensor core products
ROWS = 64
SHARES = 8  # programs per head that compute its amax, at least


class Heads(NamedTuple):
    """x (B, H, T, D) in E4M3: data (B, H, R, W), data_t (B, H, R / 128, W, 128), scale_inv (B, H), NaN if x has one.

    R is T padded to a multiple of 128; W is D padded to a power of two of at least 32. data_t is transposed by blocks
    of 128 keys, so that a tile's rows have a constant stride; its keys are in the order of `order_slots`. Unused
    layouts are None.
    """

    data: Tensor | None
    data_t: Tensor | None
    scale_inv: Tensor

    @property
    def by_rows(self) -> Tensor:
        assert self.data is not None
        return self.data

    @property
    def transposed(self) -> Tensor:
        assert self.data_t is not None
        return self.data_t


Operands = tuple[Heads, Heads, Heads]  # q, k and v


def padded(length: int) -> int:
    return triton.cdiv(length, PADDED) * PADDED


def width(features: int) -> int:
    return max(LEAST_WIDTH, triton.next_power_of_2(features))


#: Not compiled in: with a constant T = 1, rows beyond it are known to be 0, and ptxas 12.8 packs equal numbers with
#: stale register contents. Then dO beyond T was NaN, and so was dk (H200).
PADDED_ROWS = ["T", "S"]


@triton.jit
def find_head_scale(bits):
    """Return scale and 1 / scale of a head whose amax has these bits; 1 / scale is NaN if the amax is not finite."""
    scale = scale_of(bits, tl.float8e4nv, False)
    return scale, tl.where(bits < 0x7F800000, inverse_of(scale, False), float("nan"))


@triton.jit
def keep_positive(scale):
    """Return a nonzero scale of scores: 0 times a hidden score's -inf is NaN; weights stay equal. NaN stays."""
    return tl.maximum(scale, 1e-37, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def order_slots(COUNT: tl.constexpr):
    """Return which of COUNT keys is in each slot of the transposed layout.

    Of 16 columns, a thread of Hopper's accumulator has 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, but supplies 4 t to 4 t + 3
    of an FP8 operand. With the values in this order, the weights are an operand without moving between threads.
    """
    at = tl.arange(0, COUNT)
    return at // 16 * 16 + at // 2 % 2 * 8 + at // 4 % 4 * 2 + at % 2


@triton.jit
def _find_amax(
    x, bits, pair, share, shares, x_b, x_h, x_t, H, T, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Compute the amax of a share of one head's rows."""
    x += (pair // H).to(tl.int64) * x_b + (pair % H).to(tl.int64) * x_h
    largest = tl.zeros((ROWS, WIDTH), x.dtype.element_ty)
    for first in tl.range(share * ROWS, T, shares * ROWS):
        first = tl.multiple_of(first, ROWS)
        largest = larger(largest, load_tile(x, x_t, first, T, ROWS, WIDTH, D, False))
    tl.atomic_max(bits + pair, tl.max(magnitude(largest.to(tl.float32))), sem="relaxed")


@triton.jit
def fp8_attention_amax_kernel(
    q, k, v, bits, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, H, H_KV, pairs, kv_pairs, T, S, shares,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute bits, int32, initially 0: the bits of max |x| in each head of q, k and v, by `shares` programs a head.

    k and v may both be None.
    """
    pair = tl.program_id(0) // shares
    share = tl.program_id(0) % shares
    if pair < pairs:
        _find_amax(q, bits, pair, share, shares, q_b, q_h, q_t, H, T, D, WIDTH, ROWS)
    elif k is not None:
        bits += pairs
        pair -= pairs
        if pair < kv_pairs:
            _find_amax(k, bits, pair, share, shares, k_b, k_h, k_t, H_KV, S, D, WIDTH, ROWS)
        else:
            _find_amax(v, bits + kv_pairs, pair - kv_pairs, share, shares, v_b, v_h, v_t, H_KV, S, DV, WIDTH_V, ROWS)


@triton.jit
def _cast_tile(
    x, bits, scale_inv, data, data_t, index, x_b, x_h, x_t, H, T, padded,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Cast ROWS rows of one head, the index-th of x's tiles."""
    pair = index // (padded // ROWS)
    first = index % (padded // ROWS) * ROWS
    x += (pair // H).to(tl.int64) * x_b + (pair % H).to(tl.int64) * x_h
    scale, inverse = find_head_scale(tl.load(bits + pair))
    if first == 0:
        tl.store(scale_inv + pair, inverse)
    inside_rows = order_slots(ROWS)
    rows = first + inside_rows
    columns = tl.arange(0, WIDTH)
    inside = (rows < T)[:, None]
    if WIDTH != D:
        inside = inside & (columns < D)[None, :]
    v = tl.load(x + rows.to(tl.int64)[:, None] * x_t + columns[None, :], mask=inside, other=0.0)
    if data is not None:
        to = data + (pair.to(tl.int64) * padded + first) * WIDTH
        tl.store(to + inside_rows[:, None] * WIDTH + columns[None, :], to_fp8(v.to(tl.float32) * scale, tl.float8e4nv))
    if data_t is not None:
        # Transpose before the cast: ldmatrix moves 16 bits, and Triton 3.6 may move FP8 between threads wrongly.
        to = data_t + (pair.to(tl.int64) * padded + first // BLOCK * BLOCK) * WIDTH + first % BLOCK
        slots = tl.arange(0, ROWS)
        cast = to_fp8(tl.trans(v).to(tl.float32) * scale, tl.float8e4nv)
        tl.store(to + columns[:, None] * BLOCK + slots[None, :], cast)


@triton.jit(do_not_specialize=PADDED_ROWS)
def fp8_attention_cast_kernel(
    q, k, v, bits, q8, k8, v8, v8_t, q_inv, k_inv, v_inv, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    H, H_KV, pairs, kv_pairs, T, S, padded_q, padded_k,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Cast ROWS rows of one head of q or k by rows, or of v transposed and, unless v8 is None, by rows."""
    index = tl.program_id(0)
    of_q = pairs * (padded_q // ROWS)
    of_k = kv_pairs * (padded_k // ROWS)
    if index < of_q:
        _cast_tile(q, bits, q_inv, q8, None, index, q_b, q_h, q_t, H, T, padded_q, D, WIDTH, ROWS)
    elif index < of_q + of_k:
        _cast_tile(k, bits + pairs, k_inv, k8, None, index - of_q, k_b, k_h, k_t, H_KV, S, padded_k, D, WIDTH, ROWS)
    else:
        _cast_tile(
            v, bits + pairs + kv_pairs, v_inv, v8, v8_t, index - of_q - of_k, v_b, v_h, v_t, H_KV, S, padded_k,
            DV, WIDTH_V, ROWS,
        )  # fmt: skip


class _Sizes(NamedTuple):
    """Sizes of q, and of k and v; the latter are 0 without k and v."""

    heads: int
    kv_heads: int
    pairs: int
    kv_pairs: int
    rows: int
    keys: int


def _sizes(q: Tensor, k: Tensor | None) -> _Sizes:
    batch, heads, rows, _ = q.shape
    kv_heads, keys = (0, 0) if k is None else k.shape[1:3]
    return _Sizes(heads, kv_heads, batch * heads, batch * kv_heads, rows, keys)


def _constants(q: Tensor, v: Tensor | None, wide: Callable[[int], int]) -> dict[str, Any]:
    d, dv = q.shape[3], (q if v is None else v).shape[3]
    return {"D": d, "DV": dv, "WIDTH": wide(d), "WIDTH_V": wide(dv), "ROWS": ROWS, "num_warps": 4}


def _strides(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(step for x in tensors for step in ((0, 0, 0) if x is None else row_strides(x)))


@functools.cache
def _shares(device: torch.device, pairs: int) -> int:
    """Return the programs per head of the amax kernel, in all four per SM."""
    if device.type != "cuda":
        return 2  # lets the interpreter test the loop and the atomics
    return max(SHARES, triton.cdiv(4 * architecture.processors(device), pairs))


def amax_bits(q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
    """Return int32 bits of each head's amax, of q, then k, then v. (B, H, T, D), last strides 1, not empty."""
    sizes = _sizes(q, k)
    count = sizes.pairs + 2 * sizes.kv_pairs
    bits = torch.zeros(count, dtype=torch.int32, device=q.device)
    shares = min(_shares(q.device, count), triton.cdiv(max(sizes.rows, sizes.keys), ROWS))
    integers = *_strides(q, k, v), *sizes, shares
    constants = _constants(q, v, triton.next_power_of_2)
    run(fp8_attention_amax_kernel, shares * count, (q, k, v, bits), integers, constants)
    return bits


def quantize(q: Tensor, k: Tensor, v: Tensor, *, keep: bool) -> Operands:
    """Quantise q and k by rows, v transposed and, with keep, by rows, with current scaling.

    q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv), their last strides 1, not empty.
    """
    sizes, bits = _sizes(q, k), amax_bits(q, k, v)
    rows, keys = padded(sizes.rows), padded(sizes.keys)

    def by_rows(x: Tensor, length: int) -> Tensor:
        return x.new_empty(*x.shape[:2], length, width(x.shape[3]), dtype=E4M3)

    q8, k8, v8 = by_rows(q, rows), by_rows(k, keys), by_rows(v, keys) if keep else None
    v8_t = v.new_empty(*v.shape[:2], keys // PADDED, width(v.shape[3]), PADDED, dtype=E4M3)
    inverses = [x.new_empty(x.shape[:2], dtype=torch.float32) for x in (q, k, v)]
    tensors = (q, k, v, bits, q8, k8, v8, v8_t, *inverses)
    integers = *_strides(q, k, v), *sizes, rows, keys
    constants = _constants(q, v, width)
    grid = (sizes.pairs * rows + 2 * sizes.kv_pairs * keys) // ROWS
    run(fp8_attention_cast_kernel, grid, tensors, integers, constants)
    return Heads(q8, None, inverses[0]), Heads(k8, None, inverses[1]), Heads(v8, v8_t, inverses[2])
