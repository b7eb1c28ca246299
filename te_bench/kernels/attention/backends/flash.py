"""SDPA's FlashAttention-2 kernel on a GPU, and PyTorch's blocked kernel of the same name on a CPU.

Source: Dao, "FlashAttention-2", arXiv:2307.08691.
"""

from torch.nn.attention import SDPBackend

from te_bench.kernels.attention import Backend, Problem
from te_bench.kernels.attention.sdpa import pinned


def unsupported(p: Problem) -> str | None:
    v_head_dim, keys = p.v_head_dim or p.head_dim, p.length if p.kv_length is None else p.kv_length
    if v_head_dim != p.head_dim:
        return f"head_dim {p.head_dim} of q and k, {v_head_dim} of v: one for all"
    if p.length == 0 or keys == 0:
        return "length 0: the kernel needs a query and a key"
    if p.device == "cpu":
        return "dropout > 0: the CPU kernel has none" if p.dropout else None
    if p.capability is not None and p.capability < (8, 0):
        return f"compute capability {p.capability[0]}.{p.capability[1]} < 8.0"
    if p.dtype not in ("bf16", "fp16"):
        return f"dtype {p.dtype}: bf16 and fp16 only"
    if p.head_dim > 256:
        return f"head_dim {p.head_dim} > 256"
    if p.mask:
        return "mask: FlashAttention-2 takes none"
    if p.causal and keys != p.length:
        return f"causal with {p.length} queries and {keys} keys: only square causal masks"
    return None


forward = pinned(SDPBackend.FLASH_ATTENTION, grouped=lambda q: q.is_cuda)

BACKEND = Backend(
    forward=forward,
    unsupported=unsupported,
    kernels={"cuda": r"pytorch_flash", "cpu": r"_flash_attention_for_cpu"},
    operators="_scaled_dot_product_flash_attention",
)
