"""The casts of `block_formats` as torch operators: one pass over x on a GPU, plain PyTorch elsewhere or on request.

te_bench::mxfp8_cast and te_bench::nvfp4_cast show a profiler and torch.compile each cast, but not its parts. Eager
calls on a GPU go straight to the kernels.
"""

from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.operators import define
from te_bench.kernels.quantize import Quantized, block_formats, block_kernels
from te_bench.kernels.quantize.block_formats import MXFP8_LAYOUT, NVFP4_BLOCK, NVFP4_LAYOUT


def mxfp8(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rows: int = 1,
    rowwise: bool,
    columnwise: bool,
    counts: Tensor | None = None,
    portable: bool = False,
) -> Quantized:
    """Compute `block_formats.mxfp8`; portable=True runs exactly that on a GPU, too. Raises ValueError as it does."""
    if _by_kernels(x, counts, portable):
        block_formats.check_mxfp8(x, dtype, rows, rowwise, columnwise)
        data, columns = block_kernels.mxfp8(x, dtype, rows, rowwise, columnwise)
    else:
        data, columns = _mxfp8(x.detach(), dtype, rows, rowwise, columnwise, portable, counts)
    return _wrapped(rows, rowwise, columnwise, data, columns, None, None, MXFP8_LAYOUT)


def nvfp4(
    x: Tensor,
    *,
    rows: int = 1,
    rowwise: bool,
    columnwise: bool,
    transform: bool = False,
    seed: Tensor | None = None,
    counts: Tensor | None = None,
    portable: bool = False,
) -> Quantized:
    """Compute `block_formats.nvfp4`; portable=True runs exactly that on a GPU, too. Raises ValueError as it does."""
    asked = rows, rowwise, columnwise, transform, seed
    if _by_kernels(x, counts, portable):
        block_formats.check_nvfp4(x, *asked)
        made = block_kernels.nvfp4(x, *asked)
    else:
        made = _nvfp4(x.detach(), *asked, portable, counts)
    data, columns, scale_inv, scale_inv_t = made
    return _wrapped(rows, rowwise, columnwise, data, columns, scale_inv, scale_inv_t, NVFP4_LAYOUT)


def _by_kernels(x: Tensor, counts: Tensor | None, portable: bool) -> bool:
    """Return whether an eager call bypasses the operator. Counting, which is rare, is left to plain PyTorch."""
    return x.is_cuda and x.numel() > 0 and counts is None and not portable and not torch.compiler.is_compiling()


def _wrapped(
    rows: int,
    rowwise: bool,
    columnwise: bool,
    data: Tensor | None,
    columns: Tensor | None,
    scale_inv: Tensor | None,
    scale_inv_t: Tensor | None,
    layout: Any,
) -> Quantized:
    """Return Quantized of tensors stored in x's orientation; blocks of several rows are the same in both."""
    if rows > 1:
        columns, scale_inv_t = data, scale_inv
    data_t = columns.t() if columnwise and columns is not None else None
    return Quantized(data, scale_inv, data_t, scale_inv_t, layout).requested(rowwise, columnwise)


def _asked(rows: int, rowwise: bool, columnwise: bool) -> dict[str, Any]:
    """Return the arguments for `block_formats`: with square blocks one orientation serves both."""
    square = rows > 1
    return {"rows": rows, "rowwise": rowwise or square, "columnwise": columnwise and not square}


def _run_mxfp8(
    x: Tensor, dtype: torch.dtype, rows: int, rowwise: bool, columnwise: bool, portable: bool, counts: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if _by_kernels(x, counts, portable):
        return block_kernels.mxfp8(x, dtype, rows, rowwise, columnwise)
    q = block_formats.mxfp8(x, dtype, **_asked(rows, rowwise, columnwise), counts=counts)
    return q.data, None if q.data_t is None else q.data_t.t()


def _run_nvfp4(
    x: Tensor,
    rows: int,
    rowwise: bool,
    columnwise: bool,
    transform: bool,
    seed: Tensor | None,
    portable: bool,
    counts: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    if _by_kernels(x, counts, portable):
        return block_kernels.nvfp4(x, rows, rowwise, columnwise, transform, seed)
    q = block_formats.nvfp4(x, **_asked(rows, rowwise, columnwise), transform=transform, seed=seed, counts=counts)
    return q.data, None if q.data_t is None else q.data_t.t(), q.scale_inv, q.scale_inv_t


def _fake_mxfp8(x: Tensor, dtype: torch.dtype, rows: int, rowwise: bool, columnwise: bool, *_: Any) -> Any:
    return _room(x, rows, rowwise, columnwise, x.shape[0])


def _fake_nvfp4(x: Tensor, rows: int, rowwise: bool, columnwise: bool, transform: bool, *_: Any) -> Any:
    m = x.shape[0]
    padded = (m + NVFP4_BLOCK - 1) // NVFP4_BLOCK * NVFP4_BLOCK if transform else m
    room = _room(x, rows, rowwise, columnwise, padded)
    return *room, *(None if made is None else x.new_empty((), dtype=torch.float64) for made in room)


def _room(x: Tensor, rows: int, rowwise: bool, columnwise: bool, m: int) -> tuple[Tensor | None, Tensor | None]:
    """Allocate what was requested: (M, N) and (m, N) in bf16."""
    whole = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    columns = x.new_empty((m, x.shape[1]), dtype=torch.bfloat16) if columnwise and rows == 1 else None
    return whole if rowwise or rows > 1 else None, columns


_mxfp8 = define("mxfp8_cast", _run_mxfp8, _fake_mxfp8, writes=("counts",))
_nvfp4 = define("nvfp4_cast", _run_nvfp4, _fake_nvfp4, writes=("counts",))
