"""FP8 quantiser rivals, one file each. `scale` multiplies towards FP8, `scale_inv` back: x is about data * scale_inv.

A quantised (M, N) matrix has the orientations that its GEMMs read, because FP8 tensor cores read only K-major operands:
`data` (M, N) for the GEMM that contracts N and `data_t` (N, M), its transpose in memory, for the one that contracts M.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_bench import plugins

BLOCK = 128  # of block scales: 1 x 128 for activations and gradients, 128 x 128 for weights

#: Rows of a counts tensor, (3,) int64: finite elements clipped at the format's largest (even by a rounding error of the
#: scale), nonzero elements that became zero, infinite or NaN elements.
SATURATED, UNDERFLOWED, NONFINITE = range(3)


#: The block of a matrix (rows, K) that shares a scale, as (rows, columns); None is all of them.
Block = tuple[int | None, int | None]
TENSOR: Block = (None, None)
ROW: Block = (1, None)
STRIP: Block = (1, BLOCK)
SQUARE: Block = (BLOCK, BLOCK)
#: The names of blocks in operators and messages.
GRANULARITIES: dict[Block, str] = {TENSOR: "tensor", ROW: "row", STRIP: "block", SQUARE: "tile"}
BLOCKS = {name: block for block, name in GRANULARITIES.items()}

PLAIN = "plain"  # order of scales: element (i, j) is block (i, j)'s, with any strides


class Layout(NamedTuple):
    """The storage of a matrix (rows, K): x = data * scale_inv, with one scale per block.

    format and scales are the torch dtypes of data and scale_inv; scales is None without scales.
    """

    format: Any
    block: Block
    scales: Any
    order: str = PLAIN  # of scale_inv's elements; hardware may need them interleaved

    def scale_shape(self, rows: int, k: int) -> tuple[int, ...]:
        """Return scale_inv's shape: () for TENSOR, (rows,) for ROW, else (ceil(rows / height), ceil(K / width))."""
        sizes = zip((rows, k), self.block, strict=True)
        return tuple([-(-size // each) for size, each in sizes if each is not None])


class Operand(NamedTuple):
    """One side of a GEMM: data (rows, K), its scale_inv and its layout."""

    data: Any
    scale_inv: Any
    layout: Layout


class Quantized(NamedTuple):
    """x (M, N) in both orientations. One that was not requested is None, and so is its scale_inv.

    data (M, N) has layout (rows, K) = (M, N), data_t (N, M) has (rows, K) = (N, M). layout_t: data_t's, if it differs
    from data's.
    """

    data: Any
    scale_inv: Any
    data_t: Any
    scale_inv_t: Any
    layout: Layout
    layout_t: Layout | None = None

    def requested(self, rowwise: bool, columnwise: bool) -> "Quantized":
        """Return it with None for an orientation that was not requested."""
        data, scale_inv = (self.data, self.scale_inv) if rowwise else (None, None)
        data_t, scale_inv_t = (self.data_t, self.scale_inv_t) if columnwise else (None, None)
        # A compiled function cannot return what _replace makes (torch 2.11).
        return Quantized(data, scale_inv, data_t, scale_inv_t, self.layout, self.layout_t)

    def by_rows(self) -> Operand:
        """Return x (M, N), for a GEMM that contracts N."""
        return Operand(self.data, self.scale_inv, self.layout)

    def by_columns(self) -> Operand:
        """Return x's transpose (N, M), for a GEMM that contracts M."""
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

    quantize(x, dtype, block=TENSOR, *, rowwise, columnwise, scale=None, power_of_two=False, amax=None, counts=None,
    column_sum=None, via=None) -> Quantized, each block of either layout by its own amax, or, with TENSOR alone, all by a
    given () float32 scale (delayed scaling). block: TENSOR; ROW; STRIP, of either layout; SQUARE. An amax of 0, infinity
    or NaN gives scale 1; a quotient beyond float32 gives its largest; power_of_two rounds scales down to powers of two.
    Casts saturate: infinity becomes the largest, NaN stays NaN.
    counts, (3,) int64, is added to in place, once per element of x; if both layouts are written, by data, because scales
    per row and per block differ between them. With TENSOR, the sum over x's rows (a bias gradient) is added to
    column_sum, (N,) float32. With a given scale, the () float32 `amax` becomes max(amax, max |x|) in place, where NaN
    wins, and x is rounded to `via`, torch.bfloat16 or torch.float16, first, also for amax, counts and column_sum.
    Raises ValueError if no layout is requested, and for shapes, dtypes and options that do not fit.
    """

    quantize: Callable[..., Quantized]
    unsupported: Callable[[Problem], str | None] = lambda problem: None


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load
