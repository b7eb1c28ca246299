# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The quantiser of FP8 attention: E4M3 with a scale a head, by rows, transposed, or both, from one read of the tensor.

FP8 tensor cores read operands whose contracted dimension is contiguous: Q, K and dO go by rows, V transposed for O = P V and
by rows for dP = dO V^T. Both layouts are padded with zeros to whole tiles, so that no kernel looks at an edge to read one.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels._epilogue import larger, magnitude, to_fp8
from te_bench.kernels._launch import launch, traits
from te_bench.kernels.attention._kernels import row_strides
from te_bench.kernels.attention._scores import tile
from te_bench.kernels.quantize._kernels import inverse_of, scale_of

E4M3 = torch.float8_e4m3fn
PADDED = 128  # rows and keys are padded to multiples of it: the largest tile
LEAST_WIDTH = 32  # of a tensor core's FP8 products, in the contracted dimension
ROWS = 128
SHARES = 8  # programs that look for one head's amax, at least


class Heads(NamedTuple):
    """x (B, H, T, D) in E4M3: data (B, H, padded T, W), data_t (B, H, W, padded T), and scale_inv (B, H), NaN where x is.

    W is D padded to a power of two of at least 32. The keys of data_t are in the order of `in_slots`. A layout that was not
    asked for is None.
    """

    data: Tensor | None
    data_t: Tensor | None
    scale_inv: Tensor


def padded(length: int) -> int:
    return triton.cdiv(length, PADDED) * PADDED


def width(features: int) -> int:
    return max(LEAST_WIDTH, triton.next_power_of_2(features))


#: Not compiled in: were T a constant, 1, the rows beyond it would be known to be 0, and of four equal numbers ptxas 12.8
#: packs two bytes with two of what the register had before. So dO beyond T was NaN, and dk with it (H200, 2026-11-22).
PADDED_ROWS = ["T"]


@triton.jit
def head_scale(bits):
    """scale and 1 / scale of a head whose amax has these bits; the latter NaN where the amax is no number."""
    scale = scale_of(bits, tl.float8e4nv, False)
    return scale, tl.where(bits < 0x7F800000, inverse_of(scale, False), float("nan"))


@triton.jit
def in_slots(COUNT: tl.constexpr):
    """Which of COUNT keys is in each slot of the transposed layout.

    Of 16 columns of an accumulator a thread of Hopper's has 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t; of an FP8 operand it gives
    4 t to 4 t + 3. With the values in this order the weights are the operand where they are: no byte changes its thread.
    """
    at = tl.arange(0, COUNT)
    return at // 16 * 16 + at // 2 % 2 * 8 + at // 4 % 4 * 2 + at % 2


@triton.jit
def fp8_attention_amax_kernel(
    x, bits, x_b, x_h, x_t, H, T, shares, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """bits (B, H), int32: the largest of |x|'s bits in each head, by `shares` programs a head; it begins as 0."""
    pair = tl.program_id(0) // shares
    share = tl.program_id(0) % shares
    x += (pair // H).to(tl.int64) * x_b + (pair % H).to(tl.int64) * x_h
    largest = tl.zeros((ROWS, WIDTH), x.dtype.element_ty)
    for first in tl.range(share * ROWS, T, shares * ROWS):
        first = tl.multiple_of(first, ROWS)
        largest = larger(largest, tile(x, x_t, first, T, ROWS, WIDTH, D, False))
    tl.atomic_max(bits + pair, tl.max(magnitude(largest.to(tl.float32))), sem="relaxed")


@triton.jit(do_not_specialize=PADDED_ROWS)
def fp8_attention_cast_kernel(
    x, bits, scale_inv, data, data_t, x_b, x_h, x_t, H, T, across, padded,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head, of `across` tiles."""
    pair = tl.program_id(0) // across
    first = tl.program_id(0) % across * ROWS
    x += (pair // H).to(tl.int64) * x_b + (pair % H).to(tl.int64) * x_h
    scale, inverse = head_scale(tl.load(bits + pair))
    if first == 0:
        tl.store(scale_inv + pair, inverse)
    rows = first + in_slots(ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < T)[:, None]
    if WIDTH != D:
        inside = inside & (columns < D)[None, :]
    v = tl.load(x + rows.to(tl.int64)[:, None] * x_t + columns[None, :], mask=inside, other=0.0)
    if data is not None:
        to = data + pair.to(tl.int64) * padded * WIDTH
        tl.store(to + rows[:, None] * WIDTH + columns[None, :], to_fp8(v.to(tl.float32) * scale, tl.float8e4nv))
    if data_t is not None:
        # Transposed before the cast: ldmatrix moves 16 bits, and FP8 that changes its thread Triton 3.6 may get wrong.
        to = data_t + pair.to(tl.int64) * padded * WIDTH
        slots = first + tl.arange(0, ROWS)
        cast = to_fp8(tl.trans(v).to(tl.float32) * scale, tl.float8e4nv)
        tl.store(to + columns[:, None] * padded + slots[None, :], cast)


@functools.cache
def _shares(device: torch.device, pairs: int) -> int:
    """Programs a head of the amax kernel, four a processor in all."""
    if device.type != "cuda":
        return 2  # so that the interpreter tries the loop and the atomics
    return max(SHARES, triton.cdiv(4 * torch.cuda.get_device_properties(device).multi_processor_count, pairs))


def amax_bits(x: Tensor) -> Tensor:
    """(B, H) int32: the bits of each head's amax. x (B, H, T, D), its last stride 1, not empty."""
    batch, heads, length, features = x.shape
    bits = torch.zeros(batch, heads, dtype=torch.int32, device=x.device)
    shares = min(_shares(x.device, batch * heads), triton.cdiv(length, ROWS))
    integers = *row_strides(x), heads, length, shares
    constants: dict[str, Any] = {"D": features, "WIDTH": triton.next_power_of_2(features), "ROWS": 64, "num_warps": 4}
    key = *traits(x), *integers, *constants.values()
    launch(fp8_attention_amax_kernel, shares * bits.numel(), key, x.get_device(), (x, bits, *integers), constants)
    return bits


def quantize(x: Tensor, *, rowwise: bool, columnwise: bool) -> Heads:
    """x (B, H, T, D), its last stride 1, not empty, in the layouts asked for, with current scaling."""
    batch, heads, length, features = x.shape
    bits = amax_bits(x)
    whole, wide = padded(length), width(features)
    scale_inv = torch.empty(batch, heads, dtype=torch.float32, device=x.device)
    data = x.new_empty(batch, heads, whole, wide, dtype=E4M3) if rowwise else None
    data_t = x.new_empty(batch, heads, wide, whole, dtype=E4M3) if columnwise else None
    rows = 64 if columnwise else ROWS
    integers = *row_strides(x), heads, length, whole // rows, whole
    constants: dict[str, Any] = {"D": features, "WIDTH": wide, "ROWS": rows, "num_warps": 4}
    key = *traits(x, data, data_t), *integers, *constants.values()
    args = (x, bits, scale_inv, data, data_t, *integers)
    launch(fp8_attention_cast_kernel, batch * heads * (whole // rows), key, x.get_device(), args, constants)
    return Heads(data, data_t, scale_inv)
