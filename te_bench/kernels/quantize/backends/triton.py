"""The quantisers in Triton: one pass over x casts it, writes both layouts, and finds its amax, counts and column sums.

torch.compile sees te_bench::quantize, whose CPU implementation is the reference. Eager calls go straight to the
launchers. Results equal the reference's bit for bit, except column sums.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.operators import define
from te_bench.kernels.quantize import (
    BLOCK,
    BLOCKS,
    GRANULARITIES,
    TENSOR,
    Backend,
    Block,
    Layout,
    Problem,
    Quantized,
    fine_kernels,
    kernels,
)
from te_bench.kernels.quantize.backends import reference
from te_bench.kernels.quantize.kernels import float32
from te_bench.kernels.tile import FLOATS, empty_pair, lacks_triton

HALVES = (torch.bfloat16, torch.float16)


def unsupported(p: Problem) -> str | None:
    return lacks_triton(p.device) or architecture.lacks_fp8(p.capability)


class _Cast(NamedTuple):
    """The request to the quantiser; shares: a name of GRANULARITIES."""

    x: Tensor
    dtype: torch.dtype
    shares: str
    rowwise: bool
    columnwise: bool
    scale: Tensor | None
    power_of_two: bool
    amax: Tensor | None
    counts: Tensor | None
    column_sum: Tensor | None
    via: torch.dtype | None


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    block: Block = TENSOR,
    *,
    rowwise: bool,
    columnwise: bool,
    scale: Tensor | None = None,
    power_of_two: bool = False,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    column_sum: Tensor | None = None,
    via: torch.dtype | None = None,
) -> Quantized:
    """Compute fp8(x * scale) of x (M, N), in float32, bfloat16 or float16; see Backend. Raises ValueError as check."""
    reference.check(x, dtype, block, rowwise, columnwise, scale, amax, counts, column_sum, via)
    if x.dtype not in FLOATS:
        raise ValueError(f"x of {x.dtype}: float32, bfloat16 or float16; the reference backend takes any float")
    shares = GRANULARITIES[block]
    return _quantize(_Cast(x, dtype, shares, rowwise, columnwise, scale, power_of_two, amax, counts, column_sum, via))


def quantize_pair(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    w_amax: Tensor | None,
    dtype: torch.dtype,
    columnwise: bool,
    w_columnwise: bool,
) -> tuple[Quantized, Quantized] | None:
    """Quantise x (M, K) and w (N, K) by given scales, always rowwise, in one launch.

    Returns None if that takes two launches, which also report errors: other dtypes and shapes, empty matrices, and odd
    heights with a transposed layout.
    """
    if not (x.dtype in HALVES and w.dtype in HALVES) or torch.compiler.is_compiling():
        return None
    if w.dim() != 2 or w.shape[1] != x.shape[1] or not (x.numel() and w.numel()):
        return None
    if (columnwise and x.shape[0] % 2) or (w_columnwise and w.shape[0] % 2):
        return None
    return kernels.pair(x, scale, amax, w, w_scale, w_amax, dtype, columnwise, w_columnwise)


def _quantize(c: _Cast) -> Quantized:
    """Quantise by the operator, by the kernels or, for empty x, by the reference."""
    made: tuple[Tensor | None, ...]
    if torch.compiler.is_compiling():
        made = _operator(c.x.detach(), *c[1:])
    elif c.columnwise and c.x.shape[0] % 2:
        return _one_orientation_at_a_time(c)
    elif c.x.numel():
        made = _launch(c)
    else:
        return _by_reference(c)
    data, data_t, scale_inv, scale_inv_t = made
    if c.shares == "tensor":
        scale_inv_t = scale_inv
    layout = Layout(c.dtype, BLOCKS[c.shares], torch.float32)
    return Quantized(data, scale_inv, data_t, scale_inv_t, layout).requested(c.rowwise, c.columnwise)


def _launch(c: _Cast) -> tuple[Tensor | None, ...]:
    """Return data, data_t, scale_inv, scale_inv_t of x, not empty and of even height if columnwise."""
    # Triton 3.6 exchanges a float32 tile's finished FP8 bytes between threads and gets garbage (sm_90a): copy first
    # what is read along another dimension than it is written.
    x = c.x.contiguous() if c.x.dtype is torch.float32 else c.x
    if c.shares == "row":
        return fine_kernels.per_row(x, c.dtype, c.rowwise, c.columnwise, c.power_of_two, c.counts)
    if c.shares != "tensor":
        rows = 1 if c.shares == "block" else BLOCK
        return fine_kernels.per_block(x, c.dtype, rows, c.rowwise, c.columnwise, c.power_of_two, c.counts)
    given = c.rowwise, c.columnwise, c.power_of_two, c.amax, c.counts, c.column_sum, c.via
    return *kernels.per_tensor(x, c.scale, c.dtype, *given), None


def _by_reference(c: _Cast) -> Quantized:
    options = c._asdict()
    return reference.quantize(block=BLOCKS[options.pop("shares")], **options)


def _one_orientation_at_a_time(c: _Cast) -> Quantized:
    """Compute data_t from a transposed copy, because kernels write pairs of rows and M is odd; data as usual."""
    data = scale_inv = None
    if c.rowwise:
        data, scale_inv, *_ = _quantize(c._replace(x=c.x.contiguous(), columnwise=False))
    back = c._replace(x=c.x.t().contiguous(), rowwise=True, columnwise=False, column_sum=None)
    transposed = _quantize(back._replace(counts=None if c.rowwise else c.counts))
    if c.column_sum is not None and not c.rowwise:
        c.column_sum.add_((c.x if c.via is None else c.x.to(c.via)).sum(0, dtype=torch.float32))
    return Quantized(data, scale_inv, transposed.data, transposed.scale_inv, transposed.layout)


def _run(*given: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the operator's results: data, data_t, scale_inv, scale_inv_t, the last None if it is equal."""
    c = _Cast(*given)
    q = _quantize(c) if c.x.is_cuda else _by_reference(c)
    scales = [None if s is None else s.contiguous() for s in (q.scale_inv, q.scale_inv_t)]
    if c.shares == "tensor":
        scales = [scales[0] if c.rowwise else scales[1], None]
    return q.data, q.data_t, scales[0], scales[1]


def _fake(*given: Any) -> Any:
    c = _Cast(*given)
    (m, n), (height, width) = c.x.shape, BLOCKS[c.shares]
    scales: list[Tensor | None] = [c.x.new_empty((), dtype=torch.float32), None]
    if height is not None:
        sides = ((m, n) if c.rowwise else None, (n, m) if c.columnwise else None)
        scales = [None if side is None else float32(c.x, *_blocks(*side, height, width)) for side in sides]
    return *empty_pair(m, n, c.x, c.dtype, c.rowwise, c.columnwise), *scales


def _blocks(m: int, k: int, height: int, width: int | None) -> tuple[int, ...]:
    """Return how many blocks of height x width an (m, k) matrix has along each divided side."""
    down = (m + height - 1) // height
    return (down,) if width is None else (down, (k + width - 1) // width)


_run.__signature__ = inspect.signature(_Cast).replace(  # type: ignore[attr-defined]
    return_annotation=inspect.signature(_run).return_annotation
)
_operator = define("quantize", _run, _fake, writes=("amax", "counts", "column_sum"))

BACKEND = Backend(quantize=quantize, unsupported=unsupported)
