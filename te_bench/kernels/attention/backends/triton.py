"""Our own fused attention in Triton: FlashAttention-2's algorithm with Hopper's tiles, whatever the mask.

Keys and values shared by heads, windows and any mask are the kernel's own, and no mask is made of a window: keys outside
are not read. Dropout is counted by Philox from one draw of torch's generator, so that the backward pass makes it again. The
memory order of out is (B, T, H, Dv).
"""

import torch
import triton
from torch import Tensor

from te_bench.kernels.attention import Backend, Problem
from te_bench.kernels.attention.autograd import WIDEST
from te_bench.kernels.attention.autograd import attention as attention
from te_bench.kernels.attention.autograd import packed_attention as packed_attention


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda" and not triton.knobs.runtime.interpret:
        return "needs an NVIDIA GPU (or TRITON_INTERPRET=1)"
    if p.capability is not None and p.capability < (8, 0):
        return f"compute capability {p.capability[0]}.{p.capability[1]} < 8.0"
    if p.dtype == "fp64" or (p.dtype == "fp32" and not triton.knobs.runtime.interpret):
        return f"dtype {p.dtype}: bf16 and fp16 only"
    for head_dim in (p.head_dim, p.v_head_dim or p.head_dim):
        if head_dim > WIDEST:
            return f"head_dim {head_dim} > {WIDEST}"
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    mask: Tensor | None = None,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """attention's out; gradients are deterministic where torch.use_deterministic_algorithms asks for it."""
    out, _ = attention(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        dropout=dropout,
        mask=mask,
        window=(-1, -1) if window is None else window,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest: tuple[int, int],
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """packed_attention's out; deterministic as forward is."""
    out, _ = packed_attention(
        q,
        k,
        v,
        starts_q,
        starts_k,
        longest,
        causal=causal,
        scale=scale,
        dropout=dropout,
        window=(-1, -1) if window is None else window,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


BACKEND = Backend(
    forward=forward,
    unsupported=unsupported,
    kernels={"cuda": r"^attention_(forward|backward_(rows|keys)|delta)_kernel"},
    windows=True,
    packed=packed,
)
