# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Pack `block_formats`' operands, elements times scales in bf16, as Blackwell's tensor cores read them.

The elements are of E4M3, E5M2 or E2M1, two of E2M1 in a byte, the first in its lower half. A tile of 128 rows by 4
blocks has its 512 scales together, that of (row, block) at row % 32 * 16 + row // 32 * 4 + block. Packing is exact.
Source: NVIDIA PTX ISA 8.7, tcgen05.mma, block scaling; cuBLAS documentation, 1D block scaling factors layout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.launch import launch, traits
from te_bench.kernels.quantize.block_formats import MXFP8_BLOCK, NVFP4_BLOCK
from te_bench.kernels.quantize.block_kernels import e2m1, mxfp8_parts, nearest, signed, size_of

ROWS, BLOCKS = 128, 4  # of a tile of scales
BYTES = 128  # of a row, in the tile of a product: rows are padded to it
#: {format, as tl.dot_scaled calls it: (data's dtype, elements in a byte, elements of a scale, scales' dtype)}.
FORMATS = {
    "e4m3": (torch.float8_e4m3fn, 1, MXFP8_BLOCK, torch.uint8),  # a scale is E8M0's code
    "e5m2": (torch.float8_e5m2, 1, MXFP8_BLOCK, torch.uint8),
    "e2m1": (torch.uint8, 2, NVFP4_BLOCK, torch.float8_e4m3fn),
}


@triton.jit
def _nvfp4_scales(size, amax):
    """Return an E4M3 scale of each block, (blocks, 1), by which all its sizes are E2M1's numbers.

    The cast's own is amax over the E2M1 number of the block's largest element. Others that fit give the same products.
    """
    scales = 2 * amax  # where the largest element is 0.5
    for code in range(2, 8):
        largest = ((code & 1) | 2) * (1 << (code >> 1)) * 0.25  # the number with this code: 1, 1.5, 2, 3, 4, 6
        wanted = tl.div_rn(amax, largest)
        made = e2m1(size * tl.div_rn(largest, tl.where(amax > 0, amax, 1.0))) * wanted
        wrong = tl.max((made != size).to(tl.int32), 1)[:, None]
        scales = tl.where((wrong == 0) & (nearest(wanted, tl.float8e4nv) == wanted), wanted, scales)
    return scales


@triton.jit
def _code(v, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the code of v, float32 numbers of a format with so many bits, or NaN, as int32.

    Not by a conversion: on Hopper Triton 3.6 gets garbage of FP8 that moves between threads.
    """
    BIAS: tl.constexpr = 2 ** (EXPONENT - 1) - 1
    bits = v.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    subnormal = (tl.minimum(size_of(v), 1.0) * 2 ** (BIAS + MANTISSA - 1)).to(tl.int32)
    code = tl.where(normal >= 1 << MANTISSA, normal, subnormal)
    sign = bits >> (31 - EXPONENT - MANTISSA) & (1 << (EXPONENT + MANTISSA))
    return tl.where(size > 0x7F800000, 0x7F, code) | sign


@triton.jit
def block_pack_kernel(
    x, data, scales, M, K, stride, stride_k, across,
    FORMAT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write one tile of scales, of which `across` are beside each other, and its elements; x (M, K) is zero-padded."""
    COLUMNS: tl.constexpr = BLOCKS * WIDTH
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    rows, cols = down * ROWS + tl.arange(0, ROWS), right * COLUMNS + tl.arange(0, COLUMNS)
    at = rows.to(tl.int64)[:, None] * stride + cols.to(tl.int64)[None, :] * stride_k
    v = tl.load(x + at, mask=(rows < M)[:, None] & (cols < K)[None, :], other=0.0).to(tl.float32)
    v = tl.reshape(v, (ROWS * BLOCKS, WIDTH))
    size = size_of(v)
    amax = tl.max(size, 1)[:, None]
    block = tl.arange(0, ROWS * BLOCKS)
    row, column = block // BLOCKS, block % BLOCKS
    to_scales = scales + (down * across + right).to(tl.int64) * (ROWS * BLOCKS) + row % 32 * 16 + row // 32 * 4 + column
    if FORMAT == "e2m1":
        scale = _nvfp4_scales(size, amax)
        elements = signed(e2m1(size * tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0))), v)
        of_scale = _code(scale, 4, 3)
        low, high = tl.split(tl.reshape(_code(elements, 2, 1), (ROWS * BLOCKS, WIDTH // 2, 2)))
        packed = tl.reshape(low | (high << 4), (ROWS, COLUMNS // 2))
    else:
        elements, of_scale = mxfp8_parts(v, amax, tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5)
        MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
        packed = tl.reshape(_code(elements, 7 - MANTISSA, MANTISSA), (ROWS, COLUMNS))
    tl.store(to_scales, tl.reshape(of_scale, (ROWS * BLOCKS,)).to(tl.uint8))
    WIDE: tl.constexpr = packed.shape[1]
    to_data = rows.to(tl.int64)[:, None] * (across * WIDE) + right * WIDE + tl.arange(0, WIDE)[None, :]
    tl.store(data + to_data, packed.to(tl.uint8))


def packed(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return nonempty x (M, K) bf16 of any strides in a format of FORMATS: its data, and its scales.

    data (m, k bytes) and scales (1, m / 128, k / 4 blocks, 2, 256) are those of x zero-padded to multiples of 128 rows
    and 128 bytes.
    """
    dtype, per_byte, width, of_scales = FORMATS[name]
    m, k = x.shape
    high, wide = triton.cdiv(m, ROWS), triton.cdiv(k, BYTES * per_byte) * BYTES
    across = wide * per_byte // (width * BLOCKS)
    data = x.new_empty(high * ROWS, wide, dtype=torch.uint8)
    scales = x.new_empty(1, high, across, 2, ROWS * BLOCKS // 2, dtype=torch.uint8)
    args = (x, data, scales, m, k, *x.stride(), across)
    constants = {
        "FORMAT": name,
        "WIDTH": width,
        "ROWS": ROWS,
        "BLOCKS": BLOCKS,
        "num_warps": 8,
        "enable_fp_fusion": False,
    }
    launch(block_pack_kernel, high * across, (*traits(x), *args[3:], name), x.get_device(), args, constants)
    return data.view(dtype), scales.view(of_scales)
