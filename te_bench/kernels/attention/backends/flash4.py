"""FlashAttention-4: Dao-AILab's CuTe DSL kernels for Hopper and Blackwell, compiled at their first call.

Optional: `pip install "flash-attn-4[cu13]>=4.0.0b3"` (without the extra for CUDA 12). Its tensors are (B, T, H, D), its
causal mask is aligned at the bottom right, and shared K and V heads are its own. Limits as flash_attn/cute/interface.py
of 4.0.0b36 asserts them. Source: Dao-AILab/flash-attention, flash_attn/cute.
"""

import importlib.metadata

import torch
from torch import Tensor

from te_bench.kernels.attention import Backend, Problem


def _installed() -> bool:
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


INSTALLED = _installed()  # at import: torch.compile cannot trace the search


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda":
        return "needs an NVIDIA GPU: FlashAttention-4 does not run on a CPU"
    if p.capability is not None and p.capability < (9, 0):
        return f"compute capability {p.capability[0]}.{p.capability[1]} < 9.0"
    if p.dtype not in ("bf16", "fp16"):
        return f"dtype {p.dtype}: bf16 and fp16 only"
    most = 256 if p.capability is None or p.capability[0] == 9 else 128
    for head_dim in (p.head_dim, p.v_head_dim or p.head_dim):
        if head_dim % 8 or head_dim > most:
            return f"head_dim {head_dim}: multiples of 8 up to {most}"
    if p.dropout:
        return f"dropout {p.dropout}: FlashAttention-4 has none"
    if p.mask:
        return "mask: FlashAttention-4 takes masks as compiled functions, not as tensors"
    keys = p.length if p.kv_length is None else p.kv_length
    if p.causal and keys != p.length:
        return f"causal with {p.length} queries and {keys} keys: its mask is aligned at the bottom right"
    if p.length == 0 or keys == 0:
        return "length 0: the kernel needs a query and a key"
    return None if INSTALLED else "pip install 'flash-attn-4>=4.0.0b3'"


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    assert not dropout
    assert mask is None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with torch.cuda.device_of(q):  # it runs on the current device's stream
        out, _ = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
    return out.transpose(1, 2)


# Dynamo cannot trace the DSL's compiler. Disabling it imports Dynamo (1.3 s), which we avoid without the package.
forward = torch.compiler.disable(_forward) if INSTALLED else _forward

BACKEND = Backend(
    forward=forward,
    unsupported=unsupported,
    kernels={"cuda": r"flash_attn_?cute|FlashAttention(Forward|Backward)"},
)
