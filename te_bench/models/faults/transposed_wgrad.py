"""The wrong layout in wgrad: the input's (M, K) buffer is read as if it were the transposed one, (K, M)."""

import torch
from torch import Tensor

from te_bench.models.faults._planted import planted
from te_bench.models.recipe import Recipe


class TransposedWgrad(Recipe):
    def gemm(
        self,
        a: Tensor,
        a_scale_inv: Tensor,
        b: Tensor,
        b_scale_inv: Tensor,
        gemm: str,
        out_dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """b is the transpose of the input, (K, M), in wgrad: the same bytes in the order of (M, K)."""
        if gemm == "wgrad":
            bytes_ = b.view(torch.uint8)  # not every device copies FP8
            b = bytes_.t().contiguous().view(bytes_.shape).view(b.dtype)
        return super().gemm(a, a_scale_inv, b, b_scale_inv, gemm, out_dtype, bias)


def FAULT(recipe: Recipe) -> Recipe:
    return planted(TransposedWgrad, recipe)
