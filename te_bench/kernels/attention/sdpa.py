"""torch.nn.functional.scaled_dot_product_attention with one of its kernels pinned."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def pinned(backend: SDPBackend, *, grouped: Callable[[Tensor], bool]) -> Callable[..., Tensor]:
    """Return a forward that runs this SDPA kernel or raises RuntimeError; SDPA cannot choose another.

    grouped(q): whether the kernel supports grouped queries; otherwise K and V heads are repeated in memory.
    """

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        dropout: float = 0.0,
        mask: Tensor | None = None,
    ) -> Tensor:
        shared = bool(k.shape[1] != q.shape[1])  # under torch.jit.trace sizes are tensors
        if shared and not grouped(q):
            k, v, shared = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), False
        live = None if mask is None else ~mask  # SDPA's True shows
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=live, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=shared
            )

    return forward


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, Hkv, S, D) -> (B, H, S, D): each head H / Hkv times in a row."""
    times = int(heads // x.shape[1])  # under torch.jit.trace sizes are tensors, on the CPU
    return x if times == 1 else x.repeat_interleave(times, dim=1)
