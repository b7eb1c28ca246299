"""FP8 GEMM rivals, one file each: D = dequantise(a) @ dequantise(b).T + bias with both operands K-major.

What a scale stands for is read from the shape of scale_inv, float32, as te_bench.kernels.quantize writes it:
tensor (), row (rows,), block (rows, ceil(K / 128)) for 1 x 128 and tile (ceil(rows / 128), ceil(K / 128)) for 128 x 128.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_bench import plugins
from te_bench.kernels.activation import KINDS
from te_bench.kernels.quantize import BLOCK, Quantized, check_layouts

#: Granularities of (a, b) that can be multiplied: what cuBLASLt multiplies on Hopper.
PAIRS = [("tensor", "tensor"), ("row", "row"), ("block", "block"), ("block", "tile"), ("tile", "block")]

#: Activations that an epilogue has: those that are not gated, for a gated one needs two columns of the product.
ACTIVATIONS = [kind for kind, (_, gated) in KINDS.items() if not gated]


@dataclass(frozen=True, kw_only=True, slots=True)
class Epilogue:
    """What is made of x = product + bias, float32, before it leaves: y = f(round(x)) + residual, out = round(y), FP8 of out.

    Rounded to out_dtype, as separate kernels would round: x where there is an activation, so that its backward sees what
    its forward saw, and y. The FP8 is fp8(out * scale) as quantize's `scaled` has it. Raises ValueError for what makes
    no sense.
    """

    activation: str | None = None  # one of ACTIVATIONS
    keep: bool = False  # round(x) is returned too
    residual: bool = False
    out: bool = True  # False: only in FP8
    target: str | None = None  # "e4m3" or "e5m2": also in FP8
    rowwise: bool = True  # the layouts of the FP8: (M, N)
    columnwise: bool = False  # and (N, M)

    def __post_init__(self) -> None:
        if self.activation is not None:
            plugins.check("activation of an epilogue", self.activation, ACTIVATIONS)
        if self.keep and self.activation is None:
            raise ValueError("keep=True without an activation: its input would be out; leave keep out")
        if self.target is None and not self.out:
            raise ValueError('out=False and target=None leave nothing: set out=True, or target="e4m3"')
        if self.target is not None:
            plugins.check("FP8 format", self.target, ["e4m3", "e5m2"])
            check_layouts(self.rowwise, self.columnwise)


class Product(NamedTuple):
    """What a GEMM with an epilogue leaves; None for what was not asked for."""

    out: Any  # (M, N)
    pre: Any  # (M, N), the activation's input
    quantized: Quantized | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """a (M, K) and b (N, K) in FP8, contiguous along K."""

    m: int
    n: int
    k: int
    a_dtype: str  # "e4m3", "e5m2"
    b_dtype: str
    device: str
    capability: tuple[int, int] | None
    a_granularity: str = "tensor"  # "row", "block", "tile"
    b_granularity: str = "tensor"
    epilogue: Epilogue | None = None
    accumulate: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """forward(a, b, a_scale_inv, b_scale_inv, *, out_dtype, fast_accum=False, bias=None): (M, K), (N, K) -> (M, N).

    out_dtype float32, bfloat16 or float16; bias (N,), any float dtype. An empty M or N gives an empty D.
    fused(a, b, a_scale_inv, b_scale_inv, *, out_dtype, epilogue, fast_accum=False, bias=None, residual=None, scale=None,
    amax=None) -> Product: residual (M, N), any float dtype; scale and amax, () float32, are quantize's.
    accumulate(a, b, a_scale_inv, b_scale_inv, *, out, fast_accum=False): out (M, N) float32 += D, in place.
    A backend without them has None there, and `unsupported` says so.
    """

    forward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None]
    fused: Callable[..., Product] | None = None
    accumulate: Callable[..., None] | None = None


def granularity(rows: int, k: int, scale_inv: Any) -> str:
    """What one element of scale_inv scales in a (rows, k) operand: "tensor", "row", "block" or "tile".

    One row has the same shape in 1 x 128 and 128 x 128 blocks, and the same meaning: it is called "block".
    Raises ValueError for any other shape.
    """
    shape, blocks = tuple(scale_inv.shape), -(-k // BLOCK)
    legal = {"tensor": (), "row": (rows,), "block": (rows, blocks), "tile": (-(-rows // BLOCK), blocks)}
    for name, expected in legal.items():
        if shape == expected:
            return name
    raise ValueError(
        f"scale_inv of shape {shape} fits no granularity of a ({rows}, {k}) operand: "
        + ", ".join(f"{name} {expected}" for name, expected in legal.items())
    )


def granularities(a: Any, b: Any, a_scale_inv: Any, b_scale_inv: Any, bias: Any = None) -> tuple[str, str]:
    """The granularities of both operands. Raises ValueError for operands, scales or a bias that cannot be multiplied."""
    for name, x in (("a", a), ("b", b)):
        if x.dim() != 2 or x.dtype.itemsize != 1 or not x.dtype.is_floating_point or not x.is_contiguous():
            raise ValueError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)} and strides {tuple(x.stride())}: an FP8 GEMM takes "
                f"contiguous (rows, K) matrices of torch.float8_e4m3fn or torch.float8_e5m2; quantise it, or .contiguous()"
            )
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"K is {a.shape[1]} in a {tuple(a.shape)} but {b.shape[1]} in b {tuple(b.shape)}: b must be (N, K), "
            "the transpose of the right-hand side"
        )
    if bias is not None and tuple(bias.shape) != (b.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: it must be ({b.shape[0]},), one for each row of b")
    pair = granularity(a.shape[0], a.shape[1], a_scale_inv), granularity(b.shape[0], b.shape[1], b_scale_inv)
    if pair not in PAIRS:
        known = ", ".join(" x ".join(legal) for legal in PAIRS)
        raise ValueError(f"scales per {pair[0]} x {pair[1]} cannot be multiplied; possible are {known}")
    return pair


def empty_product(a: Any, b: Any, a_scale_inv: Any, b_scale_inv: Any, out_dtype: Any, *rest: Any) -> Any:
    """What an operator of `forward` returns where shapes alone are asked for: (M, N) in out_dtype."""
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def check_epilogue(a: Any, b: Any, out_dtype: Any, epilogue: Epilogue, residual: Any, scale: Any, amax: Any) -> None:
    """Raises ValueError for a residual, a scale or an amax that the epilogue does not take, or lacks."""
    shape = (a.shape[0], b.shape[0])
    if (residual is not None) != epilogue.residual:
        raise ValueError(f"residual={epilogue.residual} in the epilogue, and the residual is {type(residual).__name__}")
    if residual is not None and (tuple(residual.shape) != shape or not residual.is_contiguous()):
        raise ValueError(f"residual {tuple(residual.shape)} {tuple(residual.stride())}: it must be {shape}, contiguous")
    if (scale is not None) != (epilogue.target is not None):
        raise ValueError(f"target={epilogue.target!r} in the epilogue, and the scale is {type(scale).__name__}")
    if epilogue.target is not None and out_dtype.itemsize != 2:
        # On Hopper Triton 3.6 stores garbage where one kernel casts a float32 tile to FP8 and transposes it.
        raise ValueError(f"target={epilogue.target!r} of a {out_dtype} out: the FP8 is made of bfloat16 or float16")
    if amax is not None and scale is None:
        raise ValueError('an amax is gathered of what is cast to FP8: it takes target="e4m3" and a scale')
    for name, number in (("scale", scale), ("amax", amax)):
        if number is not None and (number.dim() or number.dtype.itemsize != 4 or not number.dtype.is_floating_point):
            raise ValueError(f"{name} {number.dtype} {tuple(number.shape)}: it must be one float32 number, of shape ()")


def check_sum(a: Any, b: Any, out: Any) -> None:
    """Raises ValueError unless the product can be added to out."""
    shape = (a.shape[0], b.shape[0])
    wrong = out.dtype.itemsize != 4 or not out.dtype.is_floating_point or tuple(out.shape) != shape
    if wrong or not out.is_contiguous():
        raise ValueError(
            f"out {out.dtype} {tuple(out.shape)} {tuple(out.stride())}: the product is added to a contiguous float32 {shape}"
        )


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load
