"""The kernels of the Triton GEMM: persistent and fed by TMA. One leaves D and what its epilogue makes of it, one adds to D.

An operand's KIND is what one of its scales scales: "tensor", "row", "block" (1 x 128) or "tile" (128 x 128).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from te_bench.kernels.activation.kernels import _value_and_slope
from te_bench.kernels.tile import INTERPRETED, magnitude, publish, rounded, to_fp8

# A tensor of one number, or a view into a table of them: not worth a compilation for each alignment.
UNALIGNED = ["scale", "amax", "scale_inv"]


@triton.jit
def _tile_origin(index, tiles_m, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The first row and column of a tile: GROUP_M tiles down, then one to the right."""
    group = index // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    return (first + within % height) * BLOCK_M, (within // height) * BLOCK_N


@triton.jit
def _product(
    a_desc, b_desc, a_scale_inv, b_scale_inv, row, column, first, last, M, N, K,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, PROMOTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The tile of a @ b.T at (row, column), float32 and with its scales, over the blocks of K from first to last.

    PROMOTE: the tensor core adds up 128 of K, float32 the rest; else all of it is in the tensor core's 14 bits. Scales per
    1 x 128 of b come as triton._along_n writes them: 32 addresses a thread with a stride known only at run time spill.
    """
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    blocks, wide = tl.cdiv(K, BLOCK_K), tl.cdiv(N, BLOCK_N) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(first, last):
        a, b = a_desc.load([row, k * BLOCK_K]), b_desc.load([column, k * BLOCK_K])
        if A_KIND == "tile":
            a_inv = tl.load(a_scale_inv + row // BLOCK_K * blocks + k)
            b_inv = tl.load(b_scale_inv + k * wide + columns)
            acc += tl.dot(a, b.T) * (b_inv * a_inv)[None, :]
        elif B_KIND == "tile":
            b_inv = tl.load(b_scale_inv + column // BLOCK_K * blocks + k)
            a_inv = tl.load(a_scale_inv + rows * blocks + k, rows < M, 0.0)
            acc += tl.dot(a, b.T) * (a_inv * b_inv)[:, None]
        elif A_KIND == "block":
            a_inv = tl.load(a_scale_inv + rows * blocks + k, rows < M, 0.0)
            b_inv = tl.load(b_scale_inv + k * wide + columns)
            acc += tl.dot(a, b.T) * a_inv[:, None] * b_inv[None, :]
        elif PROMOTE:
            # Not max_num_imprecise_acc=128: the assembler then adds a wait to each step by itself (C7517).
            acc += tl.dot(a, b.T)
        else:
            acc = tl.dot(a, b.T, acc)
    if A_KIND == "row":
        a_inv = tl.load(a_scale_inv + rows, rows < M, 0.0)
        b_inv = tl.load(b_scale_inv + columns, columns < N, 0.0)
        acc = acc * a_inv[:, None] * b_inv[None, :]
    elif A_KIND == "tensor":
        acc = acc * (tl.load(a_scale_inv) * tl.load(b_scale_inv))
    return acc


@triton.jit
def _halves(x, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right half of x."""
    return tl.split(tl.permute(tl.reshape(x, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def _leave(
    x, descs, numbers, row, column, M, N,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The epilogue of gemm.Epilogue on x, a float32 part of D at (row, column); TMA drops what lies outside of D."""
    d_desc, pre_desc, residual_desc, data_desc, data_t_desc = descs
    bias, scale, amax = numbers
    rows, columns = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
    if bias is not None:
        x += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        pre = rounded(x, DTYPE)
        if pre_desc is not None:
            pre_desc.store([row, column], pre)
        x, _ = _value_and_slope(pre.to(tl.float32), ACTIVATION)
    if residual_desc is not None:
        x += residual_desc.load([row, column]).to(tl.float32)
    y = rounded(x, DTYPE)
    if d_desc is not None:
        d_desc.store([row, column], y)
    if data_desc is not None:
        data_desc.store([row, column], to_fp8(y.to(tl.float32) * tl.load(scale), TARGET))
    if data_t_desc is not None:
        # Transposed in 16 bits, before the cast: on Hopper Triton 3.6 exchanges finished FP8 bytes wrongly.
        data_t_desc.store([column, row], to_fp8(tl.trans(y).to(tl.float32) * tl.load(scale), TARGET))
    if amax is not None:
        inside = (rows < M)[:, None] & (columns < N)[None, :]  # beyond them there is f(bias)
        publish(tl.where(inside, magnitude(y.to(tl.float32)), 0), None, amax, None)


@triton.jit
def _leave_by_parts(
    x, descs, numbers, row, column, M, N,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """_leave from left to right in PARTS, 1, 2 or 4: a part at a time is in shared memory and, twice, in registers."""
    if PARTS == 1:
        _leave(x, descs, numbers, row, column, M, N, ACTIVATION, DTYPE, TARGET, HEIGHT, WIDTH)
    else:
        HALF: tl.constexpr = WIDTH // 2
        x_left, x_right = _halves(x, HEIGHT, WIDTH)
        _leave_by_parts(x_left, descs, numbers, row, column, M, N, ACTIVATION, DTYPE, TARGET, HEIGHT, HALF, PARTS // 2)
        _leave_by_parts(
            x_right, descs, numbers, row, column + HALF, M, N, ACTIVATION, DTYPE, TARGET, HEIGHT, HALF, PARTS // 2
        )


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def scaled_kernel(
    a_desc, b_desc, d_desc, pre_desc, residual_desc, data_desc, data_t_desc,
    a_scale_inv, b_scale_inv, bias, scale, scale_inv, amax, M, N, K,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, PROMOTE: tl.constexpr,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """D = dequantise(a) @ dequantise(b).T, through _leave; what is None costs nothing."""
    if scale_inv is not None and tl.program_id(0) == 0:
        tl.store(scale_inv, tl.div_rn(1.0, tl.load(scale)))
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    descs, numbers = (d_desc, pre_desc, residual_desc, data_desc, data_t_desc), (bias, scale, amax)
    tl.assume(K > 0)  # or every tile's epilogue is there twice, once for no K at all
    # flatten: one software pipeline over all tiles, so that a tile's first loads run during the last one's epilogue.
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        row, column = _tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        x = _product(
            a_desc, b_desc, a_scale_inv, b_scale_inv, row, column, 0, tl.cdiv(K, BLOCK_K), M, N, K,
            A_KIND, B_KIND, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        _leave_by_parts(x, descs, numbers, row, column, M, N, ACTIVATION, DTYPE, TARGET, BLOCK_M, BLOCK_N, PARTS)


@triton.jit
def _add(d_desc, x, row, column):
    """D += x at (row, column), where other programs may add at the same time."""
    if INTERPRETED:  # one program after the other, and no TMA reduction (Triton 3.7)
        d_desc.store([row, column], d_desc.load([row, column]) + x)
    else:
        d_desc.atomic_add([row, column], x)


@triton.jit
def _add_by_parts(d_desc, x, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    if PARTS == 1:
        _add(d_desc, x, row, column)
    else:
        left, right = _halves(x, HEIGHT, WIDTH)
        _add_by_parts(d_desc, left, row, column, HEIGHT, WIDTH // 2, PARTS // 2)
        _add_by_parts(d_desc, right, row, column + WIDTH // 2, HEIGHT, WIDTH // 2, PARTS // 2)


@triton.jit
def gemm_accumulate_kernel(
    a_desc, b_desc, d_desc, a_scale_inv, b_scale_inv, M, N, K,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, PROMOTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """D, float32, += dequantise(a) @ dequantise(b).T; K in SPLIT shares, none of them empty, each by programs of its own."""
    tiles_m, tiles_n, blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    tiles, share = tiles_m * tiles_n, tl.cdiv(blocks, SPLIT)
    for index in tl.range(tl.program_id(0), tiles * SPLIT, PROGRAMS, flatten=True):
        # Programs side by side are in the same share of K, and meet in the L2.
        row, column = _tile_origin(index % tiles, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        first = index // tiles * share
        tl.assume(first < blocks)
        x = _product(
            a_desc, b_desc, a_scale_inv, b_scale_inv, row, column, first, min(first + share, blocks), M, N, K,
            A_KIND, B_KIND, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        _add_by_parts(d_desc, x, row, column, BLOCK_M, BLOCK_N, PARTS)
