"""FP8 GEMM rivals, one file each: D = dequantise(a) @ dequantise(b).T + bias with both operands K-major.

An operand carries its layout, named by what shares a float32 scale: "tensor", "row", "block" (1 x 128) or "tile" (128 x
128).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_bench import plugins
from te_bench.kernels.quantize import Layout

#: Supported granularities of (a, b): those of cuBLASLt on Hopper.
PAIRS = [("tensor", "tensor"), ("row", "row"), ("block", "block"), ("block", "tile"), ("tile", "block")]

#: What runs where MXFP8 and NVFP4 are not emulated: the kernel in block_scaled.py.
BLOCK_SCALED_KERNEL = "block_scaled_gemm_kernel"


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

    out_dtype float32, bfloat16 or float16; bias (N,), any float dtype. An empty M or N gives an empty D. Raises
    ValueError for unsupported layouts, and for tensors that do not fit theirs.
    """

    forward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None]


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load
