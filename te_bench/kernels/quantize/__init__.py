"""FP8 quantiser rivals, one file each. `scale` multiplies towards FP8, `scale_inv` back: x is about data * scale_inv.

A quantised (M, N) matrix is held in the orientations that its GEMMs read, for FP8 tensor cores read K-major operands only:
`data` (M, N) for the GEMM that contracts N and `data_t` (N, M), its transpose in memory, for the one that contracts M.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_bench import plugins

BLOCK = 128  # of the block scales: 1 x 128 for activations and gradients, 128 x 128 for weights

#: Rows of a counts tensor, (3,) int64: finite elements clipped at the format's largest (by a rounding error of the scale,
#: too), non-zero elements that became zero, infinite or NaN elements.
SATURATED, UNDERFLOWED, NONFINITE = range(3)


#: What shares one scale of a matrix (rows, K), as (rows, columns) of a block; None is all of them.
Block = tuple[int | None, int | None]
TENSOR: Block = (None, None)
ROW: Block = (1, None)
STRIP: Block = (1, BLOCK)
SQUARE: Block = (BLOCK, BLOCK)

PLAIN = "plain"  # an order of scales: element (i, j) is block (i, j)'s, wherever its strides put it


class Layout(NamedTuple):
    """How a matrix (rows, K) is stored: x = data * scale_inv, one scale for each block of it.

    format and scales are torch's dtypes of data and of scale_inv; scales is None where there are none.
    """

    format: Any
    block: Block
    scales: Any
    order: str = PLAIN  # of scale_inv's elements; hardware may ask for them interleaved

    def scale_shape(self, rows: int, k: int) -> tuple[int, ...]:
        """Of scale_inv: () for TENSOR, (rows,) for ROW, else (ceil(rows / height), ceil(K / width)) of a block's size."""
        sizes = zip((rows, k), self.block, strict=True)
        return tuple([-(-size // each) for size, each in sizes if each is not None])


class Operand(NamedTuple):
    """One side of a GEMM: data (rows, K), its scale_inv and its layout."""

    data: Any
    scale_inv: Any
    layout: Layout


class Quantized(NamedTuple):
    """x (M, N) in both orientations. What was not asked for is None, together with its scale_inv.

    data (M, N) is laid out as (rows, K) = (M, N), data_t (N, M) as (rows, K) = (N, M). layout_t: of data_t, where it is
    another than data's.
    """

    data: Any
    scale_inv: Any
    data_t: Any
    scale_inv_t: Any
    layout: Layout
    layout_t: Layout | None = None

    def by_rows(self) -> Operand:
        """x (M, N), for a GEMM that contracts N."""
        return Operand(self.data, self.scale_inv, self.layout)

    def by_columns(self) -> Operand:
        """x's transpose (N, M), for a GEMM that contracts M."""
        return Operand(self.data_t, self.scale_inv_t, self.layout_t or self.layout)


def check_layouts(rowwise: bool, columnwise: bool) -> None:
    if not (rowwise or columnwise):
        raise ValueError("rowwise=False and columnwise=False: ask for at least one layout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One rival. x (M, N), any float dtype, rows contiguous; dtype torch.float8_e4m3fn or torch.float8_e5m2.

    scaled(x, scale, dtype, *, rowwise, columnwise, amax=None, counts=None, column_sum=None, via=None): by a given ()
    float32 scale (delayed scaling); the () float32 `amax` becomes max(amax, max |x|) in place, NaN above everything.
    via torch.bfloat16 or torch.float16: x is rounded to it first, for amax, counts and column_sum, too.
    tensor(x, dtype, *, rowwise, columnwise, power_of_two=False, counts=None, column_sum=None): by x's own amax.
    row(x, dtype, *, rowwise, columnwise, power_of_two=False, counts=None): each row of either layout by its own amax.
    block(x, dtype, *, rows, rowwise, columnwise, power_of_two=True, counts=None): rows 1: 1 x 128 of either layout;
    rows 128: 128 x 128.
    Each -> Quantized. An amax of 0, infinity or NaN gives scale 1; a quotient beyond float32 gives its largest.
    counts, (3,) int64, is added to in place, once for each element of x whichever layouts are written: by data where
    both are, for scales per row and per block differ between them. column_sum, (N,) float32, is added the sum over x's
    rows (a bias gradient). Casts saturate: infinity becomes the largest, NaN stays NaN. Raises ValueError when no layout
    is asked for, and for shapes and dtypes that do not fit.
    """

    scaled: Callable[..., Quantized]
    tensor: Callable[..., Quantized]
    row: Callable[..., Quantized]
    block: Callable[..., Quantized]
    unsupported: Callable[[Problem], str | None] = lambda problem: None


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load
