"""torch.nn.functional.scaled_dot_product_attention with one of its kernels pinned."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def pinned(backend: SDPBackend) -> Callable[..., Tensor]:
    """A forward that runs this SDPA kernel or raises RuntimeError: SDPA has no other to choose from."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float = 0.0) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, scale=scale)

    return forward
