# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton kernels of `block_formats`: one pass over x writes both orientations in bf16; NVFP4 needs an amax pass before.

Both are stored in x's orientation, because a bf16 GEMM reads either way. No FP8 or FP4 instruction is needed: elements
are rounded by adding and subtracting 1.5 x 2^23 steps, so every GPU that Triton supports runs them. A tile's blocks are
the rows of (blocks, 16) or (blocks, 32), for the other orientation of its transpose.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.launch import launch, rows_contiguous, traits
from te_bench.kernels.quantize.block_formats import MXFP8_BLOCK, NEGATIVE, NVFP4_BLOCK
from te_bench.kernels.quantize.kernels import load_tile
from te_bench.kernels.tile import FP8, INTERPRETED, rounded

# No fusion: a product fused with an addition would not be rounded as the rules say.
TILE: dict[str, Any] = {"ROWS": 64, "COLUMNS": 64, "num_warps": 8, "enable_fp_fusion": False}
#: With four warps the transform would use wgmma, for which ptxas 12.8 waits one by one.
AMAX_TILE: dict[str, Any] = {**TILE, "ROWS": 32, "num_warps": 2}

MAGIC = tl.constexpr(12582912.0)  # 1.5 x 2^23: adding that many steps rounds to a step, ties to even
# Float32, as in the rules.
PER_E4M3, PER_E5M2, PER_E2M1 = (tl.constexpr(torch.tensor(1 / limit).item()) for limit in (448, 57344, 6))
LARGEST = tl.constexpr(3.4028234663852886e38)
SIGNS = tl.constexpr(NEGATIVE)
UNALIGNED = ["seed", "amaxes", "scale_inv", "scale_inv_t"]


@triton.jit
def size_of(v):
    """Return |v|, 0 for NaN."""
    return tl.where(v == v, tl.abs(v), 0.0)


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """Round float32 x to the nearest of an FP8 format, saturated, in float32; NaN stays."""
    LIMIT: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
    MANTISSA: tl.constexpr = 3 if dtype == tl.float8e4nv else 2
    SMALLEST: tl.constexpr = 121 if dtype == tl.float8e4nv else 113  # biased exponents of 2^-6 and 2^-14, normal
    size = tl.minimum(tl.abs(x), LIMIT)
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, SMALLEST)
    add = ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True) * MAGIC
    return tl.where(x == x, signed((size + add) - add, x), x)


@triton.jit
def signed(size, x):
    """Return size with the sign of x."""
    bits = size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _of_rows(v):
    return tl.max(size_of(v), 1)[:, None]


@triton.jit
def _of_squares(v):
    """Return the amax of each square block of `_squares`, (down, 1, across, 1)."""
    return tl.expand_dims(tl.expand_dims(tl.max(tl.max(size_of(v), 3), 1), 1), 3)


@triton.jit
def mxfp8_parts(v, amax, dtype: tl.constexpr):
    """Return mxfp8_elements of v by its blocks' amaxes, which broadcast to it: elements in float32, codes in int32."""
    INVERSE: tl.constexpr = PER_E4M3 if dtype == tl.float8e4nv else PER_E5M2
    bits = (amax * INVERSE).to(tl.int32, bitcast=True)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000))
    code = tl.minimum(exponent + up.to(tl.int32), 254)
    inverse = tl.maximum((254 - code) << 23, 0x400000).to(tl.float32, bitcast=True)
    return nearest(v * inverse, dtype), code


@triton.jit
def _mxfp8(v, amax, dtype: tl.constexpr):
    """Round v through MXFP8: the elements of `mxfp8_parts` times their scales."""
    elements, code = mxfp8_parts(v, amax, dtype)
    return elements * tl.maximum(code << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def _step(size):
    return tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))


@triton.jit
def _per_step(size):
    return tl.where(size < 2.0, 2.0, tl.where(size < 4.0, 1.0, 0.5))


@triton.jit
def e2m1(size):
    """Round size, 0 to 6, to the nearest of E2M1's numbers."""
    add = _step(size) * MAGIC
    return (size + add) - add


@triton.jit
def _nvfp4(v, amax, encode, random):
    """Round v through NVFP4, as `_mxfp8`: nvfp4_elements times its scales. random: None, or bytes."""
    scale = nearest(tl.minimum(amax * (encode * PER_E2M1), 448.0), tl.float8e4nv)
    inverse = tl.minimum(tl.div_rn(1.0, scale * tl.div_rn(1.0, encode)), LARGEST)
    y = v * inverse
    size = tl.where(y == y, tl.abs(y), 8.0)
    if random is None:
        size = e2m1(tl.minimum(size, 6.0))
    else:
        size = tl.minimum(size, 8.0)
        size += random * (_step(size) * 0.00390625)
        step = _step(size)
        size = tl.minimum(tl.floor(size * _per_step(size)) * step, 6.0)
    return tl.where(y == y, signed(size, y), size) * scale


@triton.jit
def _encode(bits):
    """Return the tensor's scale for the amax with these bits."""
    amax = bits.to(tl.float32, bitcast=True)
    found = tl.minimum(tl.div_rn(2688.0, tl.where(bits > 0, amax, 1.0)), LARGEST)
    return tl.where((bits > 0) & (found > 0), found, 1.0)


@triton.jit
def _random_bytes(seed, block, stream):
    """Return block_formats.random_bytes of blocks, (blocks, 16)."""
    zero = block * 0
    first, second, third, fourth = tl.philox(
        tl.load(seed).to(tl.uint64, bitcast=True), block, zero + stream, zero, zero
    )
    lane = tl.arange(0, 16)[None, :]
    low = tl.where(lane < 4, first[:, None], second[:, None])
    high = tl.where(lane < 12, third[:, None], fourth[:, None])
    word = tl.where(lane < 8, low, high)
    return ((word >> (lane % 4 * 8).to(tl.uint32)) & 0xFF).to(tl.int32).to(tl.float32)


@triton.jit
def _transformed(v):
    """Return block_formats.hadamard of v (blocks, 16), in v's dtype, as float32."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    both = i & j
    if INTERPRETED:  # the interpreter multiplies bf16's bits
        v = v.to(tl.float32)
    odd = (both ^ (both >> 1) ^ (both >> 2) ^ (both >> 3) ^ (SIGNS >> i)) & 1
    h = tl.where(odd == 1, -0.25, 0.25).to(v.dtype)
    return rounded(tl.dot(v, h, input_precision="ieee"), tl.bfloat16).to(tl.float32)


@triton.jit
def _lines(v, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the blocks of v's columns, (blocks, width)."""
    return tl.reshape(tl.trans(v), (COLUMNS * ROWS // WIDTH, WIDTH))


@triton.jit
def _put(y, to, rows, cols, M, N):
    """Store y, (rows, columns) float32, in `to` (M, N), in bf16."""
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(to + rows.to(tl.int64)[:, None] * N + cols[None, :], rounded(y, tl.bfloat16), mask=mask)


@triton.jit
def _put_lines(y, to, rows, cols, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`_put` for blocks of columns made by `_lines`."""
    _put(tl.trans(tl.reshape(y, (COLUMNS, ROWS))), to, rows, cols, M, N)


@triton.jit
def _squares(v, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return v by square blocks, (down, width, across, width), as a view: Triton 3.6 miscompiles permutations."""
    return tl.reshape(v, (ROWS // WIDTH, WIDTH, COLUMNS // WIDTH, WIDTH))


@triton.jit
def mxfp8_cast_kernel(
    x, data, columns, stride, M, N,
    SQUARE: tl.constexpr, TARGET: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write, per tile, data (M, N) by blocks of its rows, or square ones, and columns (M, N) by blocks of columns."""
    v, rows, cols = load_tile(x, tl.program_id(0), stride, M, N, ROWS, COLUMNS)
    v = v.to(tl.float32)
    if data is not None:
        if SQUARE:
            squares = _squares(v, ROWS, COLUMNS, WIDTH)
            y = _mxfp8(squares, _of_squares(squares), TARGET)
        else:
            blocks = tl.reshape(v, (ROWS * COLUMNS // WIDTH, WIDTH))
            y = _mxfp8(blocks, _of_rows(blocks), TARGET)
        _put(tl.reshape(y, (ROWS, COLUMNS)), data, rows, cols, M, N)
    if columns is not None:
        lines = _lines(v, ROWS, COLUMNS, WIDTH)
        _put_lines(_mxfp8(lines, _of_rows(lines), TARGET), columns, rows, cols, M, N, ROWS, COLUMNS)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def nvfp4_amax_kernel(
    x, amaxes, stride, M, N,
    PLAIN: tl.constexpr, TRANSFORM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute amaxes (2,) int32, initially 0: the bits of x's amax, and of its Hadamard-transformed columns'."""
    v, _, _ = load_tile(x, tl.program_id(0), stride, M, N, ROWS, COLUMNS)
    if PLAIN:
        largest = tl.max(size_of(v.to(tl.float32)).to(tl.int32, bitcast=True))
        tl.atomic_max(amaxes, largest, sem="relaxed")
    if TRANSFORM:
        y = size_of(_transformed(_lines(v, ROWS, COLUMNS, WIDTH)))
        tl.atomic_max(amaxes + 1, tl.max(y.to(tl.int32, bitcast=True)), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def nvfp4_cast_kernel(
    x, amaxes, seed, data, columns, scale_inv, scale_inv_t, stride, M, N,
    SQUARE: tl.constexpr, TRANSFORM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As mxfp8_cast_kernel; with TRANSFORM columns has M rounded up to 16. seed: None, or rounds stochastically."""
    index = tl.program_id(0)
    across = tl.cdiv(N, COLUMNS)
    v, rows, cols = load_tile(x, index, stride, M, N, ROWS, COLUMNS)
    block = tl.arange(0, ROWS * COLUMNS // WIDTH)
    down, right = index // across * ROWS, index % across * COLUMNS  # of the tile's first element
    random = None
    if data is not None:
        bits = tl.load(amaxes)
        encode = _encode(bits)
        if index == 0:
            tl.store(scale_inv, bits.to(tl.float32, bitcast=True).to(tl.float64) / 2688.0)
        if SQUARE:
            squares = _squares(v.to(tl.float32), ROWS, COLUMNS, WIDTH)
            y = _nvfp4(squares, _of_squares(squares), encode, None)
        else:
            PER_ROW: tl.constexpr = COLUMNS // WIDTH
            if seed is not None:
                at = (down + block // PER_ROW) * tl.cdiv(N, WIDTH) + right // WIDTH + block % PER_ROW
                random = _random_bytes(seed, at, 0)
            blocks = tl.reshape(v.to(tl.float32), (ROWS * COLUMNS // WIDTH, WIDTH))
            y = _nvfp4(blocks, _of_rows(blocks), encode, random)
        _put(tl.reshape(y, (ROWS, COLUMNS)), data, rows, cols, M, N)
    if columns is not None:
        PER_COLUMN: tl.constexpr = ROWS // WIDTH
        lines, last = _lines(v, ROWS, COLUMNS, WIDTH), M
        if TRANSFORM:
            bits_t = tl.load(amaxes + 1)
            lines, last = _transformed(lines), tl.cdiv(M, WIDTH) * WIDTH
        else:
            bits_t = tl.load(amaxes)
        if index == 0:
            tl.store(scale_inv_t, bits_t.to(tl.float32, bitcast=True).to(tl.float64) / 2688.0)
        if seed is not None:
            at = (right + block // PER_COLUMN) * tl.cdiv(M, WIDTH) + down // WIDTH + block % PER_COLUMN
            random = _random_bytes(seed, at, 1)
        lines = lines.to(tl.float32)
        y = _nvfp4(lines, _of_rows(lines), _encode(bits_t), random)
        _put_lines(y, columns, rows, cols, last, N, ROWS, COLUMNS)


def mxfp8(
    x: Tensor, dtype: torch.dtype, rows: int, rowwise: bool, columnwise: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return data and columns, (M, N) in bf16, of nonempty x (M, N); columns is None for square blocks."""
    x = rows_contiguous(x)
    (m, n), stride, square = x.shape, x.stride(0), rows > 1
    data = x.new_empty(m, n, dtype=torch.bfloat16) if rowwise or square else None
    columns = x.new_empty(m, n, dtype=torch.bfloat16) if columnwise and not square else None
    key = (*traits(x), stride, m, n, data is None, columns is None, square, dtype)
    constants = {"SQUARE": square, "TARGET": FP8[dtype], "WIDTH": MXFP8_BLOCK, **TILE}
    launch(mxfp8_cast_kernel, _tiles(m, n), key, x.get_device(), (x, data, columns, stride, m, n), constants)
    return data, columns


def nvfp4(
    x: Tensor, rows: int, rowwise: bool, columnwise: bool, transform: bool, seed: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return data (M, N) and columns (M, N), M rounded up to 16 if transform, in bf16, and both scale_inv."""
    x = rows_contiguous(x)
    (m, n), stride, device, square = x.shape, x.stride(0), x.get_device(), rows > 1
    rowwise, columnwise = rowwise or square, columnwise and not square
    transform = transform and columnwise
    amaxes = torch.zeros(2, dtype=torch.int32, device=x.device)
    key = (*traits(x), stride, m, n, rowwise, columnwise, transform)
    constants = {"PLAIN": rowwise or not transform, "TRANSFORM": transform, "WIDTH": NVFP4_BLOCK, **AMAX_TILE}
    launch(nvfp4_amax_kernel, _tiles(m, n, AMAX_TILE), key, device, (x, amaxes, stride, m, n), constants)
    high = -(-m // NVFP4_BLOCK) * NVFP4_BLOCK if transform else m
    data = x.new_empty(m, n, dtype=torch.bfloat16) if rowwise else None
    columns = x.new_empty(high, n, dtype=torch.bfloat16) if columnwise else None
    scale_inv = x.new_empty((), dtype=torch.float64) if rowwise else None
    scale_inv_t = x.new_empty((), dtype=torch.float64) if columnwise else None
    args = (x, amaxes, seed, data, columns, scale_inv, scale_inv_t, stride, m, n)
    constants = {"SQUARE": square, "TRANSFORM": transform, "WIDTH": NVFP4_BLOCK, **TILE}
    launch(nvfp4_cast_kernel, _tiles(m, n), (*key, square, seed is None), device, args, constants)
    return data, columns, scale_inv, scale_inv_t


def _tiles(m: int, n: int, tile: dict[str, Any] = TILE) -> int:
    """Return the programs; the last row of tiles includes the transform's zero rows, as heights are multiples of 16."""
    return -(-m // tile["ROWS"]) * -(-n // tile["COLUMNS"])
