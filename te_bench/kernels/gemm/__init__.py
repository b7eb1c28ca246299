"""FP8 GEMM rivals, one file each: D = dequantise(a) @ dequantise(b).T + bias with both operands K-major.

An operand carries its layout; by what shares one of its float32 scales it is called "tensor", "row", "block" (1 x 128) or
"tile" (128 x 128).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_bench import plugins
from te_bench.kernels.activation import KINDS
from te_bench.kernels.quantize import Layout, Quantized, check_layouts

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


NO_EPILOGUE = Epilogue()  # the product and its bias alone


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
    a: Layout
    b: Layout
    device: str
    capability: tuple[int, int] | None
    epilogue: Epilogue | None = None
    accumulate: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """forward(a, b, *, out_dtype, fast_accum=False, bias=None): quantize.Operands (M, K) and (N, K) -> (M, N).

    out_dtype float32, bfloat16 or float16; bias (N,), any float dtype. An empty M or N gives an empty D.
    fused(a, b, *, out_dtype, epilogue, fast_accum=False, bias=None, residual=None, scale=None, amax=None) -> Product:
    residual (M, N), any float dtype; scale and amax, () float32, are quantize's.
    accumulate(a, b, *, out, fast_accum=False): out (M, N) float32 += D, in place.
    A backend without them has None there, and `unsupported` says so. Each raises ValueError for layouts that it does not
    multiply, and for tensors that do not fit theirs.
    """

    forward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None]
    fused: Callable[..., Product] | None = None
    accumulate: Callable[..., None] | None = None


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load
