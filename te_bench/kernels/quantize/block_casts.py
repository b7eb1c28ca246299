"""The casts of `block_formats` as torch operators: one pass over x on a GPU, plain PyTorch elsewhere or on request.

te_bench::mxfp8_cast and te_bench::nvfp4_cast show a profiler and torch.compile each cast, but not its parts. Eager
calls on a GPU go straight to the kernels.
"""

from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.operators import without_none
from te_bench.kernels.quantize import Quantized, block_formats, block_kernels
from te_bench.kernels.quantize.backends.triton import wrap
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
        block_formats.check(x, rows, block_formats.MXFP8_BLOCK, rowwise, columnwise)
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
        block_formats.check(x, rows, NVFP4_BLOCK, rowwise, columnwise)
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
    return wrap(rowwise, columnwise, data, data_t, scale_inv, scale_inv_t, layout=layout)


def _asked(rows: int, rowwise: bool, columnwise: bool) -> dict[str, Any]:
    """Return the arguments for `block_formats`: with square blocks one orientation serves both."""
    square = rows > 1
    return {"rows": rows, "rowwise": rowwise or square, "columnwise": columnwise and not square}


@torch.library.custom_op("te_bench::mxfp8_cast", mutates_args=("counts",))
def _mxfp8(
    x: Tensor, dtype: torch.dtype, rows: int, rowwise: bool, columnwise: bool, portable: bool, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    if _by_kernels(x, counts, portable):
        return without_none(x, *block_kernels.mxfp8(x, dtype, rows, rowwise, columnwise))
    q = block_formats.mxfp8(x, dtype, **_asked(rows, rowwise, columnwise), counts=counts)
    return without_none(x, q.data, None if q.data_t is None else q.data_t.t())


@_mxfp8.register_fake
def _(x: Tensor, dtype: torch.dtype, rows: int, rowwise: bool, columnwise: bool, *_: Any) -> tuple[Tensor, Tensor]:
    return _room(x, rows, rowwise, columnwise, x.shape[0])


@torch.library.custom_op("te_bench::nvfp4_cast", mutates_args=("counts",))
def _nvfp4(
    x: Tensor,
    rows: int,
    rowwise: bool,
    columnwise: bool,
    transform: bool,
    seed: Tensor | None,
    portable: bool,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _by_kernels(x, counts, portable):
        return without_none(x, *block_kernels.nvfp4(x, rows, rowwise, columnwise, transform, seed))
    q = block_formats.nvfp4(x, **_asked(rows, rowwise, columnwise), transform=transform, seed=seed, counts=counts)
    columns = None if q.data_t is None else q.data_t.t()
    return without_none(x, q.data, columns, q.scale_inv, q.scale_inv_t)


@_nvfp4.register_fake
def _(x: Tensor, rows: int, rowwise: bool, columnwise: bool, transform: bool, *_: Any) -> Any:
    m = x.shape[0]
    padded = (m + NVFP4_BLOCK - 1) // NVFP4_BLOCK * NVFP4_BLOCK if transform else m
    data, columns = _room(x, rows, rowwise, columnwise, padded)
    first, second = (
        x.new_empty((), dtype=torch.float64) if made.dim() == 2 else x.new_empty(0) for made in (data, columns)
    )
    return data, columns, first, second


def _room(x: Tensor, rows: int, rowwise: bool, columnwise: bool, m: int) -> tuple[Tensor, Tensor]:
    """Allocate an operator's results: (M, N) and (m, N) in bf16, or empty of x's dtype if not requested."""
    absent = x.new_empty(0), x.new_empty(0)
    return (
        torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
        if rowwise or rows > 1
        else absent[0],
        x.new_empty((m, x.shape[1]), dtype=torch.bfloat16) if columnwise and rows == 1 else absent[1],
    )
