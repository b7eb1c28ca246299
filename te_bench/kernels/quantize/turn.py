# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Transpose an FP8 matrix in memory: with one scale, this is bitwise the layout that `quantize` writes as data_t.

It is memory-bound, two bytes an element. As in the casts, rows 2i and 2i + 1 make the 16 bits that ldmatrix transposes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.launch import launch, traits
from te_bench.kernels.quantize.kernels import store_t

# A tile's row is 128 bytes in either layout; a thread reads VECTOR of a row, 16 bytes, at once.
TILE: dict[str, Any] = {"ROWS": 128, "COLUMNS": 128, "VECTOR": 16, "num_warps": 8}


@triton.jit
def turn_kernel(data, data_t, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr):
    """Write data (M, N), uint8, transposed to data_t (N, M), a tile per program; M is even."""
    index, across = tl.program_id(0), tl.cdiv(N, COLUMNS)
    rows = index // across * ROWS + 2 * tl.arange(0, ROWS // 2)
    cols = tl.max_contiguous(index % across * COLUMNS + tl.arange(0, COLUMNS), [VECTOR])
    mask = (rows < M)[:, None] & (cols < N)[None, :]  # M is even: both rows exist, or neither
    at = data + rows.to(tl.int64)[:, None] * N + cols[None, :]
    a, b = tl.load(at, mask=mask, other=0), tl.load(at + N, mask=mask, other=0)
    store_t(a, b, data_t, index, cols, M, N, ROWS, COLUMNS, "")


def turn(data: Tensor) -> Tensor:
    """Transpose data (M, N), of any one-byte dtype, to contiguous (N, M); on a GPU by the kernel."""
    if not data.is_cuda or torch.compiler.is_compiling() or data.shape[0] % 2 or not data.numel():
        return data.t().contiguous()
    return turn_by_kernel(data.contiguous())


def turn_by_kernel(data: Tensor) -> Tensor:
    """`turn` by the kernel: contiguous data, M even, nothing empty."""
    m, n = data.shape
    data_t = torch.empty((n, m), dtype=data.dtype, device=data.device)
    as_bytes = data.view(torch.uint8), data_t.view(torch.uint8)
    grid = -(-m // TILE["ROWS"]) * -(-n // TILE["COLUMNS"])
    launch(turn_kernel, grid, (*traits(*as_bytes), m, n), data.get_device(), (*as_bytes, m, n), TILE)
    return data_t
