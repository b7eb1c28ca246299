"""The quantisers in Triton: one pass over x casts it, writes both layouts, and finds its amax, counts and column sums.

torch.compile sees four operators, whose CPU implementation is the reference. Eager calls go straight to the launchers,
because a custom operator costs the host about 20 us a call. Results equal the reference's bit for bit, except column
sums.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.operators import without_none
from te_bench.kernels.quantize import (
    BLOCK,
    ROW,
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
from te_bench.kernels.quantize.backends.reference import check
from te_bench.kernels.quantize.kernels import float32
from te_bench.kernels.tile import FLOATS, empty_pair, lacks_triton

HALVES = (torch.bfloat16, torch.float16)


def unsupported(p: Problem) -> str | None:
    return lacks_triton(p.device) or architecture.lacks_fp8(p.capability)


class _Cast(NamedTuple):
    """The request to a quantiser; each of the four uses some of the fields."""

    x: Tensor
    dtype: torch.dtype
    rowwise: bool
    columnwise: bool
    scale: Tensor | None = None
    amax: Tensor | None = None
    counts: Tensor | None = None
    column_sum: Tensor | None = None
    via: torch.dtype | None = None
    rows: int = 1
    power_of_two: bool = False


def scaled(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    column_sum: Tensor | None = None,
    via: torch.dtype | None = None,
) -> Quantized:
    """Compute fp8(x * scale) of x (M, N) with a given () float32 scale, x's amax and counts; see Backend, check."""
    return _quantize("scaled", _Cast(x, dtype, rowwise, columnwise, scale, amax, counts, column_sum, via))


def scaled_pair(
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
    """Compute `scaled` of x (M, K) and w (N, K), always rowwise, in one launch.

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


def tensor(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool = False,
    counts: Tensor | None = None,
    column_sum: Tensor | None = None,
) -> Quantized:
    """Compute fp8(x * scale) of x (M, N) with one scale, from its own amax; see Backend. Raises ValueError as check."""
    return _quantize(
        "tensor", _Cast(x, dtype, rowwise, columnwise, None, None, counts, column_sum, None, 1, power_of_two)
    )


def row(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool = False,
    counts: Tensor | None = None,
) -> Quantized:
    """Compute fp8(x * scale) of x (M, N) with a scale per row of data and per row of data_t; see Backend.

    Raises ValueError as check.
    """
    return _quantize("row", _Cast(x, dtype, rowwise, columnwise, None, None, counts, None, None, 1, power_of_two))


def block(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rows: int,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool = True,
    counts: Tensor | None = None,
) -> Quantized:
    """Compute fp8(x * scale) of x (M, N) with a scale per rows x 128 block of either layout; see Backend.

    rows is 1 or 128; blocks at the edges are smaller. Raises ValueError for other rows, and as check.
    """
    return _quantize("block", _Cast(x, dtype, rowwise, columnwise, None, None, counts, None, None, rows, power_of_two))


def _quantize(function: str, c: _Cast) -> Quantized:
    """Run one of the four functions: by its operator, by its kernels or, for empty x, by the reference."""
    check(*c[:-1])
    if c.x.dtype not in FLOATS:
        raise ValueError(f"x of {c.x.dtype}: float32, bfloat16 or float16; the reference backend takes any float")
    made: tuple[Tensor | None, ...]
    if torch.compiler.is_compiling():
        made = _OPERATORS[function](c.x.detach(), *c[1:])
    elif c.columnwise and c.x.shape[0] % 2:
        return _one_orientation_at_a_time(function, c)
    elif c.x.numel():
        made = _launch(function, c)
    else:
        return _by_reference(function, c)
    data, data_t, scale_inv, scale_inv_t = made
    layout = Layout(c.dtype, _block_of(function, c), torch.float32)
    if layout.block == TENSOR:
        scale_inv_t = scale_inv
    return wrap(c.rowwise, c.columnwise, data, data_t, scale_inv, scale_inv_t, layout=layout)


def _block_of(function: str, c: _Cast) -> Block:
    """Return the block that shares a scale."""
    return {"row": ROW, "block": (c.rows, BLOCK)}.get(function, TENSOR)


def _launch(function: str, c: _Cast) -> tuple[Tensor | None, ...]:
    """Return data, data_t, scale_inv, scale_inv_t of x, not empty and of even height if columnwise."""
    # Triton 3.6 exchanges a float32 tile's finished FP8 bytes between threads and gets garbage (sm_90a): copy first
    # what is read along another dimension than it is written.
    x = c.x.contiguous() if c.x.dtype is torch.float32 else c.x
    if function == "row":
        return fine_kernels.per_row(x, c.dtype, c.rowwise, c.columnwise, c.power_of_two, c.counts)
    if function == "block":
        return fine_kernels.per_block(x, c.dtype, c.rows, c.rowwise, c.columnwise, c.power_of_two, c.counts)
    given = c.rowwise, c.columnwise, c.power_of_two, c.amax, c.counts, c.column_sum, c.via
    return *kernels.per_tensor(x, c.scale, c.dtype, *given), None


def _by_reference(function: str, c: _Cast) -> Quantized:
    names = ("rowwise", "columnwise", *_OPTIONS[function])
    made: Quantized = getattr(reference, function)(c.x, dtype=c.dtype, **{name: getattr(c, name) for name in names})
    return made


def _one_orientation_at_a_time(function: str, c: _Cast) -> Quantized:
    """Compute data_t from a transposed copy, because kernels write pairs of rows and M is odd; data as usual."""
    data = scale_inv = None
    if c.rowwise:
        data, scale_inv, *_ = _quantize(function, c._replace(x=c.x.contiguous(), columnwise=False))
    back = c._replace(x=c.x.t().contiguous(), rowwise=True, columnwise=False, column_sum=None)
    transposed = _quantize(function, back._replace(counts=None if c.rowwise else c.counts))
    if c.column_sum is not None and not c.rowwise:
        c.column_sum.add_((c.x if c.via is None else c.x.to(c.via)).sum(0, dtype=torch.float32))
    return Quantized(data, scale_inv, transposed.data, transposed.scale_inv, transposed.layout)


def wrap(
    rowwise: bool,
    columnwise: bool,
    data: Tensor | None,
    data_t: Tensor | None,
    scale_inv: Tensor | None,
    scale_inv_t: Tensor | None,
    *,
    layout: Layout,
) -> Quantized:
    """Return Quantized with None for a layout that was not requested, where operators return empty tensors."""
    return Quantized(
        data if rowwise else None,
        scale_inv if rowwise else None,
        data_t if columnwise else None,
        scale_inv_t if columnwise else None,
        layout,
    )


def _operator(function: str) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Make te_bench::quantize_FUNCTION(*_Cast) -> data, data_t, scale_inv, scale_inv_t; the last is empty if equal."""

    @torch.library.custom_op(f"te_bench::quantize_{function}", mutates_args=("amax", "counts", "column_sum"))
    def operator(
        x: Tensor,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        scale: Tensor | None,
        amax: Tensor | None,
        counts: Tensor | None,
        column_sum: Tensor | None,
        via: torch.dtype | None = None,
        rows: int = 1,
        power_of_two: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        c = _Cast(x, dtype, rowwise, columnwise, scale, amax, counts, column_sum, via, rows, power_of_two)
        q = _quantize(function, c) if x.is_cuda else _by_reference(function, c)
        scales = [None if s is None else s.contiguous() for s in (q.scale_inv, q.scale_inv_t)]
        if q.layout.block == TENSOR:
            scales = [scales[0] if rowwise else scales[1], None]
        return without_none(x, q.data, q.data_t, *scales)

    @operator.register_fake
    def _(*given: Any) -> Any:
        c = _Cast(*given)
        (m, n), (height, width) = c.x.shape, _block_of(function, c)
        scales: list[Tensor | None] = [c.x.new_empty((), dtype=torch.float32), None]
        if height is not None:
            sides = ((m, n) if c.rowwise else None, (n, m) if c.columnwise else None)
            scales = [None if side is None else float32(c.x, *_blocks(*side, height, width)) for side in sides]
        return without_none(c.x, *empty_pair(m, n, c.x, c.dtype, c.rowwise, c.columnwise), *scales)

    return operator


def _blocks(m: int, k: int, height: int, width: int | None) -> tuple[int, ...]:
    """Return how many blocks of height x width an (m, k) matrix has along each divided side."""
    down = (m + height - 1) // height
    return (down,) if width is None else (down, (k + width - 1) // width)


#: {function: fields of _Cast that it uses besides x, dtype and the orientations}.
_OPTIONS = {
    "scaled": ("scale", "amax", "counts", "column_sum", "via"),
    "tensor": ("power_of_two", "counts", "column_sum"),
    "row": ("power_of_two", "counts"),
    "block": ("rows", "power_of_two", "counts"),
}
_OPERATORS = {function: _operator(function) for function in _OPTIONS}

BACKEND = Backend(scaled=scaled, tensor=tensor, row=row, block=block, unsupported=unsupported)
