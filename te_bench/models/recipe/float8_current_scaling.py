"""Per-tensor current scaling: every tensor is scaled by its own amax, measured just before the cast.

Semantics of Transformer Engine's Float8CurrentScaling: HYBRID, fast accumulation in fprop only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from te_bench.kernels.gemm import reference, scaled_mm
from te_bench.kernels.quantize.reference import quantize
from te_bench.models.recipe import Format

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID

    def quantize(self, x: Tensor, role: str) -> tuple[Tensor, Tensor]:
        forward, backward = self.fp8_format.value
        return quantize(x, DTYPES[backward if role == "grad_output" else forward])

    def gemm(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], gemm: str, out_dtype: torch.dtype) -> Tensor:
        multiply = scaled_mm.forward if a[0].device.type == "cuda" else reference.forward
        return multiply(a[0], b[0], a[1], b[1], out_dtype=out_dtype, fast_accum=gemm == "fprop")

    def unsupported(self, device: str, capability: tuple[int, int] | None) -> str | None:
        if device == "cuda" and capability is not None and capability < (8, 9):
            return f"FP8 tensor cores need compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
        return None


RECIPE = Float8CurrentScaling()
