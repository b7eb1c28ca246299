"""FlexAttention: a Triton kernel that torch.compile writes for the mask it is given, blocks above the diagonal skipped.

Source: Dong et al., "Flex Attention", arXiv:2412.05496; torch.nn.attention.flex_attention.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.attention import Backend, Problem
from te_bench.kernels.attention.sdpa import repeat_heads


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda":
        return "needs a GPU: torch's FlexAttention has no backward on a CPU"
    if p.dropout:
        return f"dropout {p.dropout}: FlexAttention has none"
    if p.dtype == "fp64":
        return "dtype fp64: fp32, bf16 and fp16 only"
    for head_dim in (p.head_dim, p.v_head_dim or p.head_dim):
        if head_dim < 16:
            return f"head_dim {head_dim} < 16"
    if p.mask:
        return "mask: FlexAttention would compile a kernel, and sort blocks, for each mask it is given"
    return None


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


@lru_cache(maxsize=8)
def _block_mask(rows: int, keys: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_causal, None, None, rows, keys, device=str(device))


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    assert not dropout
    assert mask is None
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    blocks = _block_mask(q.shape[-2], k.shape[-2], q.device) if causal else None
    if torch.compiler.is_compiling():  # inside a compiled model: let Inductor fuse it there
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, block_mask=blocks, scale=scale)
    return _compiled()(q, k, v, block_mask=blocks, scale=scale)


BACKEND = Backend(forward=forward, unsupported=unsupported, kernels={"cuda": r"flex_attention"}, compiled=True)
