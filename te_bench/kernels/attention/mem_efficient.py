"""SDPA's memory-efficient kernel (CUTLASS, from xFormers): O(T) memory, any NVIDIA GPU, float32 too.

Source: Rabe and Staats, "Self-attention does not need O(n^2) memory", arXiv:2112.05682.
"""

from torch.nn.attention import SDPBackend

from te_bench.kernels.attention import Backend, Problem
from te_bench.kernels.attention._sdpa import pinned


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda":
        return "needs an NVIDIA GPU: SDPA has no memory-efficient kernel on a CPU"
    multiple = 4 if p.dtype == "fp32" else 8  # rows must start on 16-byte boundaries
    if p.head_dim % multiple:
        return f"head_dim {p.head_dim} is not a multiple of {multiple} in {p.dtype}"
    return None


forward = pinned(SDPBackend.EFFICIENT_ATTENTION)

BACKEND = Backend(
    forward=forward,
    unsupported=unsupported,
    kernels={"cuda": r"fmha_cutlass"},
    operators="_scaled_dot_product_efficient_attention",
)
