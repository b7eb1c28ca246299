"""GEMMs in the table of measured times: their shapes, and which shapes a row covers. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_bench.kernels import measured
from te_bench.kernels.gemm import names
from te_bench.kernels.measured import Timing

#: Smaller gains are noise. In a captured graph a launch costs the GPU nothing; in eager mode Gluon's costs the host
#: more than cuBLASLt's, which can exceed the gain if the host is the bottleneck.
LEAST_GAIN = 1.05
#: A row covers heights within this factor of its own, and all with this many waves of tiles on the GPU's SMs, where the
#: ragged last wave hardly matters.
NEAR_HEIGHT, TILE, MANY_WAVES = 1.25, 128, 8
DTYPES = ("e4m3", "bf16")
#: {granularity: what shares a scale in (a, b)}.
SCALES = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("block", "tile")}
ACTIVATED, GRADIENT = "activated", "gradient"
#: Rivals in half precision: torch's GEMM; that and the activation's kernel; the Gluon GEMM with both.
TORCH, SEPARATE, GLUON = "torch", "separate", "gluon"
CUBLASLT = ("scaled_mm", TORCH)  # in FP8 and in half precision


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmShape:
    """D (M, N) = a (M, K) b (N, K)^T. FP8 has scales per tensor, row or block: 1 x 128 of a and 128 x 128 of b.

    fast_accum: the tensor core keeps 14-bit sums; blocks are promoted as they are scaled. epilogue: "activated", D and
    f(D); "gradient", D f'(h), with b as (K, N). Measured with GELU.
    """

    m: int
    n: int
    k: int
    dtype: str  # of the operands; D is half precision
    scales: str | None = None
    fast_accum: bool = False
    epilogue: str | None = None

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 1:
            raise ValueError(f"sizes must be at least 1: {self.m}, {self.n}, {self.k}")
        if self.dtype not in DTYPES or self.epilogue not in (None, ACTIVATED, GRADIENT):
            raise ValueError(
                f"no GEMM in {self.dtype!r} with the epilogue {self.epilogue!r} is chosen by measured times"
            )
        fp8 = self.dtype == "e4m3"
        if fp8 != (self.scales in SCALES) or (not fp8 and (self.scales is not None or self.fast_accum)):
            raise ValueError(f"scales {self.scales!r}, fast_accum {self.fast_accum}: FP8 has scales, nothing else has")
        if self.scales == "block" and self.fast_accum:
            raise ValueError("fast_accum with scales per block: every block of K is promoted when it is scaled")
        if fp8 and self.epilogue is not None:
            raise ValueError(f"epilogue {self.epilogue!r} in FP8: it is that of a GEMM in half precision")


def rivals(shape: GemmShape) -> list[str]:
    """Return the names of the rivals for a shape, on any machine."""
    if shape.dtype == "e4m3":
        return names()
    return [TORCH if shape.epilogue is None else SEPARATE, GLUON]


def read_problem(body: Mapping[str, Any]) -> GemmShape:
    """Read a shape from a row's JSON. Raises ValueError or TypeError if it is invalid."""
    return GemmShape(**body)


def nearest(machine: str, processors: int, m: int, **shape: Any) -> Timing | None:
    """Return the machine's row of this shape that covers height m, with the nearest height; or None."""

    def times_as_high(known: GemmShape) -> float:
        same = all(getattr(known, name) == value for name, value in shape.items())
        if not same or not _stands_for(known, m, processors):
            return math.inf
        return max(m, known.m) / min(m, known.m)

    found = measured.nearest("gemm", machine, times_as_high)
    return None if found is None else found[0]


def _stands_for(known: GemmShape, m: int, processors: int) -> bool:
    if not m:
        return False
    tiles = min(-(-height // TILE) * -(-known.n // TILE) for height in (m, known.m))
    return max(m, known.m) <= NEAR_HEIGHT * min(m, known.m) or tiles >= MANY_WAVES * processors
