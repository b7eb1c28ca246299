"""FP8 GEMM rivals, one file each: D = dequantise(a) @ dequantise(b).T + bias with both operands K-major.

An operand carries its layout; by what shares one of its float32 scales it is called "tensor", "row", "block" (1 x 128) or
"tile" (128 x 128).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_bench import plugins
from te_bench.kernels.quantize import Layout

#: Granularities of (a, b) that can be multiplied: what cuBLASLt multiplies on Hopper.
PAIRS = [("tensor", "tensor"), ("row", "row"), ("block", "block"), ("block", "tile"), ("tile", "block")]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """forward(a, b, *, out_dtype, fast_accum=False, bias=None): quantize.Operands (M, K) and (N, K) -> (M, N).

    out_dtype float32, bfloat16 or float16; bias (N,), any float dtype. An empty M or N gives an empty D. Raises ValueError
    for layouts that it does not multiply, and for tensors that do not fit theirs.
    """

    forward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None]


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load
