"""SDPA's cuDNN kernel: the fastest stock attention on Hopper, which PyTorch does not choose by itself.

Source: NVIDIA cuDNN frontend, "Fused Flash Attention"; limits as PyTorch's sdp_utils.cpp checks them. Masks are
unsupported: on Hopper, torch 2.11's backward gives NaN with one at lengths of 64 modulo 128 (pytorch issue 196678).
Other widths of v and non-square causal masks are unsupported: nothing shows that SDPA's backward is right.
"""

from torch.nn.attention import SDPBackend

from te_bench.kernels.attention import Backend, Problem
from te_bench.kernels.attention.sdpa import pinned


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda":
        return "needs an NVIDIA GPU: cuDNN does not run on a CPU"
    if p.capability is not None and p.capability < (8, 0):
        return f"compute capability {p.capability[0]}.{p.capability[1]} < 8.0"
    if p.dtype not in ("bf16", "fp16"):
        return f"dtype {p.dtype}: bf16 and fp16 only"
    if p.head_dim % 8 or p.head_dim > 128:
        return f"head_dim {p.head_dim}: multiples of 8 up to 128"
    if p.v_head_dim not in (None, p.head_dim):
        return f"head_dim {p.head_dim} of q and k, {p.v_head_dim} of v: one for all"
    keys = p.length if p.kv_length is None else p.kv_length
    if p.length == 0 or keys == 0:
        return "length 0: the kernel needs a query and a key"
    if keys == 1:
        return "length 1: cuDNN has no kernel for one key"
    if p.dropout and p.length == 1:
        return "length 1 with dropout: cuDNN has no kernel for one query"
    if p.mask:
        return "mask: cuDNN's backward through SDPA gives NaN with one"
    if p.causal and keys != p.length:
        return f"causal with {p.length} queries and {keys} keys: only square causal masks"
    return None


forward = pinned(SDPBackend.CUDNN_ATTENTION, grouped=lambda q: True)

BACKEND = Backend(
    forward=forward,
    unsupported=unsupported,
    kernels={"cuda": r"cudnn.*sdpa|cudnn.*flash|sdpa_sm\d+_flash"},
    operators="_scaled_dot_product_cudnn_attention",
)
