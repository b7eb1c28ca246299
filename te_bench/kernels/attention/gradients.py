"""Where the gradients of q, k and v go: side by side where these lie so and who reads them can read all three at once.

Others would pay for it: torch's concatenation, which is the gradient of a split, is a slower kernel for parts with gaps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_read_at_once = ContextVar("_read_at_once", default=False)


@contextmanager
def read_at_once() -> Iterator[None]:
    """Of attention called herein the gradients of q, k and v are read as one matrix where they lie side by side."""
    before = _read_at_once.set(True)
    try:
        yield
    finally:
        _read_at_once.reset(before)


def apart() -> bool:
    """Whether gradients of what is called now go into memory of their own each; torch.compile is told that they do."""
    return torch.compiler.is_compiling() or not _read_at_once.get()


def room(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for dq, dk, dv, as empty_like has it; of (B, H, T, D) that are views of one (B, T, 3, H, D), views of another.

    A copy joins them otherwise.
    """
    batch, heads, rows, width = q.shape
    if not _side_by_side(q, k, v):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dq, dk, dv = q.new_empty(batch, rows, 3, heads, width).permute(2, 0, 3, 1, 4).unbind()
    return dq, dk, dv


def _side_by_side(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k and v (B, H, T, D) are views of one (B, T, 3, H, D)."""
    _, heads, rows, width = q.shape
    features = heads * width
    one, first = q.untyped_storage().data_ptr(), q.storage_offset()
    return q.stride() == (rows * 3 * features, width, 3 * features, 1) and all(
        x.shape == q.shape
        and x.stride() == q.stride()
        and x.dtype is q.dtype
        and x.untyped_storage().data_ptr() == one
        and x.storage_offset() == first + i * features
        for i, x in enumerate((k, v), 1)
    )
