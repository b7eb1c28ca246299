"""The kernels of the Triton GEMM: persistent, fed by TMA, one for tensor and row scales, one for block scales."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from te_bench.kernels._epilogue import rounded


@triton.jit
def _tile_origin(index, tiles_m, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The first row and column of a tile: GROUP_M tiles down, then one to the right."""
    group = index // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    return (first + within % height) * BLOCK_M, (within // height) * BLOCK_N


@triton.jit
def _store(d_desc, d, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr):
    """d, rounded, into D at (row, column); what lies outside of D is dropped by TMA."""
    if HALVES == 1:
        d_desc.store([row, column], rounded(d, d_desc.dtype))
    else:
        left, right = tl.split(tl.permute(tl.reshape(d, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        d_desc.store([row, column], rounded(left, d_desc.dtype))
        d_desc.store([row, column + BLOCK_N // 2], rounded(right, d_desc.dtype))


@triton.jit
def scaled_kernel(
    a_desc,
    b_desc,
    d_desc,
    a_scale_inv,
    b_scale_inv,
    bias,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HALVES: tl.constexpr,
    ROW: tl.constexpr,
    BIAS: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """D = (a @ b.T) * a_scale_inv * b_scale_inv + bias, scales per tensor or (ROW) per row of a and of b.

    IMPRECISE is how much of K the tensor core adds up before float32 does: 128, or None for all of it.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # flatten: one software pipeline over all tiles, so that a tile's first loads run during the last one's epilogue.
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        row, column = _tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            a, b = a_desc.load([row, k * BLOCK_K]), b_desc.load([column, k * BLOCK_K])
            acc = tl.dot(a, b.T, acc, max_num_imprecise_acc=IMPRECISE)
        rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        if ROW:
            a_inv = tl.load(a_scale_inv + rows, rows < M, 0.0)
            b_inv = tl.load(b_scale_inv + columns, columns < N, 0.0)
            acc = acc * a_inv[:, None] * b_inv[None, :]
        else:
            acc = acc * (tl.load(a_scale_inv) * tl.load(b_scale_inv))
        if BIAS:
            acc += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
        _store(d_desc, acc, row, column, BLOCK_M, BLOCK_N, HALVES)


@triton.jit
def block_kernel(
    a_desc,
    b_desc,
    d_desc,
    a_scale_inv,
    b_scale_inv,
    bias,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
    A_TILE: tl.constexpr,
    B_TILE: tl.constexpr,
    BIAS: tl.constexpr,
):
    """D = sum over blocks of K of (a_block @ b_block.T) * a_scale_inv * b_scale_inv, + bias; every BLOCK_ is 128.

    Scales per 1 x 128, or (A_TILE, B_TILE) per 128 x 128 of that operand: one number a tile of D then. Those per 1 x 128
    of b come as triton._along_n writes them: 32 addresses a thread with a stride known only at run time spill.
    """
    tiles_m, tiles_n, blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        row, column = _tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(blocks):
            a, b = a_desc.load([row, k * BLOCK_K]), b_desc.load([column, k * BLOCK_K])
            partial = tl.dot(a, b.T)
            if A_TILE:
                b_inv = tl.load(b_scale_inv + k * tiles_n * BLOCK_N + columns)
                a_inv = tl.load(a_scale_inv + row // BLOCK_M * blocks + k)
                acc += partial * (b_inv * a_inv)[None, :]
            else:
                a_inv = tl.load(a_scale_inv + rows * blocks + k, rows < M, 0.0)
                if B_TILE:
                    b_inv = tl.load(b_scale_inv + column // BLOCK_N * blocks + k)
                    acc += partial * (a_inv * b_inv)[:, None]
                else:
                    b_inv = tl.load(b_scale_inv + k * tiles_n * BLOCK_N + columns)
                    acc += partial * a_inv[:, None] * b_inv[None, :]
        if BIAS:
            acc += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
        _store(d_desc, acc, row, column, BLOCK_M, BLOCK_N, 1)
