"""FP8 GEMM by exact emulation: dequantise to float32 (every FP8 product is exact there) and multiply. Runs anywhere."""

import torch
from torch import Tensor

from te_bench.kernels.gemm import Backend, Problem


def unsupported(p: Problem) -> str | None:
    return None


def forward(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, *, out_dtype: torch.dtype, fast_accum: bool = False
) -> Tensor:
    """D = (a @ b.T) * a_scale_inv * b_scale_inv with float32 accumulation; a (M, K), b (N, K) FP8 -> (M, N) out_dtype."""
    with torch.autocast(a.device.type, enabled=False):
        return ((a.float() @ b.float().t()) * (a_scale_inv * b_scale_inv)).to(out_dtype)


BACKEND = Backend(forward=forward, unsupported=unsupported)
