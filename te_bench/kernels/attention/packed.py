"""Attention of packed sequences, by a backend that supports them, or by padding for one that does not."""

from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.attention import Backend, attend


def attend_packed(
    backend: Backend,
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
    """Compute q (rows, H, D), k (keys, Hkv, D), v (keys, Hkv, Dv) -> (rows, H, Dv), each sequence separately.

    Sequence b is rows starts_q[b] to starts_q[b + 1], and likewise keys; longest: rows and keys of the longest. Rows of
    no sequence, and rows without visible keys, are 0. A backend without `packed` gets padded sequences and a mask.
    """
    options: dict[str, Any] = {"causal": causal, "scale": scale, "dropout": dropout, "window": window}
    if backend.packed is not None:
        out: Tensor = backend.packed(q, k, v, starts_q, starts_k, longest, **options)
        return out
    padded_q, _ = _padded(q, starts_q, longest[0])
    padded_k, beyond = _padded(k, starts_k, longest[1])
    padded_v, _ = _padded(v, starts_k, longest[1])
    out = attend(backend, padded_q, padded_k, padded_v, mask=beyond[:, None, None], **options)
    return _unpadded(out, starts_q, len(q))


def _padded(x: Tensor, starts: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return x padded to (sequences, heads, longest, features), and which positions are beyond their sequence's end."""
    positions = torch.arange(longest, device=x.device)
    beyond = positions >= (starts[1:] - starts[:-1])[:, None]
    at = (starts[:-1, None] + positions).clamp(max=max(len(x) - 1, 0))
    return x[at].masked_fill(beyond[..., None, None], 0.0).transpose(1, 2), beyond


def _unpadded(x: Tensor, starts: Tensor, rows: int) -> Tensor:
    """Gather (sequences, heads, longest, features) -> (rows, heads, features); rows of no sequence are 0."""
    row = torch.arange(rows, device=x.device)
    sequence = torch.searchsorted(starts[1:].contiguous().to(row.dtype), row, right=True)
    outside = (row < starts[0]) | (sequence >= len(starts) - 1)
    sequence = sequence.clamp(max=len(starts) - 2)
    place = (row - starts[:-1][sequence]).clamp(min=0, max=x.shape[2] - 1)
    return x.transpose(1, 2)[sequence, place].masked_fill(outside[:, None, None], 0.0)
