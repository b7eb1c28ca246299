"""E5M2 in the forward pass: activations and weights keep two mantissa bits in place of three.

cuBLASLt multiplies neither E5M2 by E5M2 nor E5M2 with block scales, so the reference's GEMMs, exact float32 sums of the
same operands, run on every device.
"""

import torch
from torch import Tensor

from te_bench.kernels.gemm.backends import reference
from te_bench.kernels.quantize import Operand
from te_bench.models.faults import Fault
from te_bench.models.recipe import Recipe


class E5M2Forward(Recipe):
    def dtype(self, role: str) -> torch.dtype:
        return super().dtype(role) if role == "grad_output" else torch.float8_e5m2

    def gemm(self, a: Operand, b: Operand, gemm: str, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        return reference.forward(a, b, out_dtype=out_dtype, bias=bias)


FAULT = Fault(E5M2Forward, of_fp8=True)
