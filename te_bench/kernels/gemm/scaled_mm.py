"""FP8 GEMM by cuBLASLt through torch._scaled_mm, one scale per tensor.

Source: NVIDIA cuBLAS documentation, FP8 matmul: sm_89 and newer, K and N multiples of 16, not E5M2 x E5M2.
"""

import torch
from torch import Tensor

from te_bench.kernels.gemm import Backend, Problem


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda":
        return "needs an NVIDIA GPU"
    if p.capability is not None and p.capability < (8, 9):
        return f"compute capability {p.capability[0]}.{p.capability[1]} < 8.9"
    if p.k % 16 or p.n % 16:
        return f"N {p.n} and K {p.k} must be multiples of 16"
    if p.a_dtype == p.b_dtype == "e5m2":
        return "E5M2 x E5M2: cuBLASLt has no such kernel"
    return None


def forward(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, *, out_dtype: torch.dtype, fast_accum: bool = False
) -> Tensor:
    """D = (a * a_scale_inv) @ (b * b_scale_inv).T; a (M, K), b (N, K) FP8 -> (M, N) out_dtype.

    fast_accum keeps the tensor core's 14-bit accumulator for the whole of K; without it cuBLASLt promotes to float32.
    """
    return torch._scaled_mm(
        a, b.t(), scale_a=a_scale_inv, scale_b=b_scale_inv, out_dtype=out_dtype, use_fast_accum=fast_accum
    )


BACKEND = Backend(forward=forward, unsupported=unsupported)
