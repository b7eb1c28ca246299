"""SDPA's memory-efficient kernel (CUTLASS, from xFormers): O(T) memory, any NVIDIA GPU, float32 too.

Source: Rabe and Staats, "Self-attention does not need O(n^2) memory", arXiv:2112.05682.
"""

from torch.nn.attention import SDPBackend

from te_bench.kernels.attention import Backend, Problem
from te_bench.kernels.attention.sdpa import pinned


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda":
        return "needs an NVIDIA GPU: SDPA has no memory-efficient kernel on a CPU"
    if p.dtype == "fp64":
        return "dtype fp64: fp32, bf16 and fp16 only"
    multiple = 4 if p.dtype == "fp32" else 8  # rows must start on 16-byte boundaries
    for head_dim in (p.head_dim, p.v_head_dim or p.head_dim):
        if head_dim % multiple:
            return f"head_dim {head_dim} is not a multiple of {multiple} in {p.dtype}"
    if p.length == 0 or p.kv_length == 0:
        return "length 0: the kernel needs a query and a key"
    return None


forward = pinned(SDPBackend.EFFICIENT_ATTENTION, grouped=lambda q: False)

BACKEND = Backend(
    forward=forward,
    unsupported=unsupported,
    kernels={"cuda": r"fmha_cutlass"},
    operators="_scaled_dot_product_efficient_attention",
)
