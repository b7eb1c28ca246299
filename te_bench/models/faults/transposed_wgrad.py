"""The wrong layout in wgrad: the input's (M, K) buffer is read as if it were the transposed one, (K, M)."""

from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.quantize import Operand
from te_bench.models.faults import Fault
from te_bench.models.recipe import Recipe


class TransposedWgrad(Recipe):
    def gemm(self, a: Operand, b: Operand, gemm: str, *others: Any) -> Tensor:
        """In wgrad, reinterpret b, the transposed input (K, M), as the same bytes in (M, K) order."""
        if gemm == "wgrad":
            dtype = b.data.dtype
            stored = b.data.view(torch.uint8) if dtype.itemsize == 1 else b.data  # not every device copies FP8
            b = b._replace(data=stored.t().contiguous().view(stored.shape).view(dtype))
        return super().gemm(a, b, gemm, *others)


FAULT = Fault(TransposedWgrad)
