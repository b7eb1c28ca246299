"""FP8 GEMM rivals, one file each: D = dequantise(a) @ dequantise(b).T + bias with both operands K-major.

What a scale stands for is read from the shape of scale_inv (float32, contiguous, as te_bench.kernels.quantize writes it):
tensor (), row (rows,), block (rows, ceil(K / 128)) for 1 x 128 and tile (ceil(rows / 128), ceil(K / 128)) for 128 x 128.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_bench import plugins
from te_bench.kernels.quantize import BLOCK

#: Granularities of (a, b) that can be multiplied: what cuBLASLt multiplies on Hopper.
PAIRS = [("tensor", "tensor"), ("row", "row"), ("block", "block"), ("block", "tile"), ("tile", "block")]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """forward(a, b, a_scale_inv, b_scale_inv, *, out_dtype, fast_accum=False, bias=None): (M, K), (N, K) -> (M, N).

    out_dtype float32, bfloat16 or float16; bias (N,), any float dtype. An empty M or N gives an empty D.
    """

    forward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None]


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


def names() -> list[str]:
    return plugins.names(__name__)


def load(name: str) -> Backend:
    """The backend in NAME.py. Raises ValueError for an unknown name."""
    backend = plugins.load(__name__, name, "BACKEND")
    assert isinstance(backend, Backend)
    return backend
