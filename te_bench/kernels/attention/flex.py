"""FlexAttention: a Triton kernel that torch.compile writes for the mask it is given, blocks above the diagonal skipped.

Source: Dong et al., "Flex Attention", arXiv:2412.05496; torch.nn.attention.flex_attention.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.attention import Backend, Problem


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda":
        return "needs a GPU: torch's FlexAttention has no backward on a CPU"
    if p.dropout:
        return f"dropout {p.dropout}: FlexAttention has none"
    if p.head_dim < 16:
        return f"head_dim {p.head_dim} < 16"
    return None


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


@lru_cache(maxsize=8)
def _block_mask(length: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_causal, None, None, length, length, device=str(device))


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float = 0.0) -> Tensor:
    assert not dropout
    mask = _block_mask(q.shape[-2], q.device) if causal else None
    if torch.compiler.is_compiling():  # inside a compiled model: let Inductor fuse it there
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, block_mask=mask, scale=scale)
    return _compiled()(q, k, v, block_mask=mask, scale=scale)


BACKEND = Backend(forward=forward, unsupported=unsupported, kernels={"cuda": r"flex_attention"})
