"""Attention as four separate operators, the way nanoGPT writes it without SDPA: the baseline of every ladder.

Source: Karpathy, nanoGPT model.py (the branch for PyTorch < 2.0): the scores are scaled after QK^T, not before it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_bench.kernels.attention import Backend
from te_bench.kernels.attention.sdpa import repeat_heads


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = (q @ k.transpose(-2, -1)) * scale  # (B, H, T, D) @ (B, H, D, S) -> (B, H, T, S)
    if causal:
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~past, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    weights = F.softmax(scores, dim=-1)
    if dropout:
        weights = F.dropout(weights, p=dropout)
    return weights @ v  # (B, H, T, S) @ (B, H, S, Dv) -> (B, H, T, Dv)


BACKEND = Backend(forward=forward)
