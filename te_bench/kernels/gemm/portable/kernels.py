"""The kernel of the Triton GEMM: persistent and fed by TMA.

An operand's KIND is what shares a scale: "tensor", "row", "block" (1 x 128) or "tile" (128 x 128).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from te_bench.kernels.tile import rounded


@triton.jit
def _tile_origin(index, tiles_m, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return a tile's first row and column: GROUP_M tiles down, then one to the right."""
    group = index // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    return (first + within % height) * BLOCK_M, (within // height) * BLOCK_N


@triton.jit
def _product(
    a_desc, b_desc, a_scale_inv, b_scale_inv, row, column, M, N, K,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, PROMOTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the scaled float32 tile of a @ b.T at (row, column).

    PROMOTE: the tensor core accumulates 128 of K, float32 the rest; otherwise all is in the tensor core's 14 bits. b's
    scales per 1 x 128 come as triton._along_n writes them: 32 addresses a thread with a runtime stride would spill.
    """
    blocks = tl.cdiv(K, BLOCK_K)
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    wide = tl.cdiv(N, BLOCK_N) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(blocks):
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
            # Not max_num_imprecise_acc=128: the assembler would then add waits to each step (C7517).
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
    return tl.split(tl.permute(tl.reshape(x, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def _leave_by_parts(
    x, d_desc, bias, row, column, N,
    DTYPE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store D = x + bias, a float32 part at (row, column), rounded; TMA drops what lies outside of D.

    It stores PARTS (1, 2 or 4) from left to right: one part at a time is in shared memory and twice in registers.
    """
    if PARTS == 1:
        columns = column + tl.arange(0, WIDTH)
        if bias is not None:
            x += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
        d_desc.store([row, column], rounded(x, DTYPE))
    else:
        HALF: tl.constexpr = WIDTH // 2
        x_left, x_right = _halves(x, HEIGHT, WIDTH)
        _leave_by_parts(x_left, d_desc, bias, row, column, N, DTYPE, HEIGHT, HALF, PARTS // 2)
        _leave_by_parts(x_right, d_desc, bias, row, column + HALF, N, DTYPE, HEIGHT, HALF, PARTS // 2)


@triton.jit
def scaled_kernel(
    a_desc, b_desc, d_desc, a_scale_inv, b_scale_inv, bias, M, N, K,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, PROMOTE: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute D = dequantise(a) @ dequantise(b).T + bias; a bias of None costs nothing."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tl.assume(K > 0)  # otherwise every tile's epilogue is compiled twice, once for K = 0
    # flatten: one software pipeline over all tiles, so that a tile's first loads run during the previous epilogue.
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        row, column = _tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        x = _product(
            a_desc, b_desc, a_scale_inv, b_scale_inv, row, column, M, N, K,
            A_KIND, B_KIND, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        _leave_by_parts(x, d_desc, bias, row, column, N, DTYPE, BLOCK_M, BLOCK_N, PARTS)
