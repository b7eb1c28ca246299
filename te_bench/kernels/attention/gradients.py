"""The memory of dq, dk and dv: side by side if q, k and v are so, and the reader can read all three as one matrix.

Other readers would lose: torch's concatenation (the gradient of a split) is slower for parts with gaps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_read_at_once = ContextVar("_read_at_once", default=False)


@contextmanager
def read_at_once() -> Iterator[None]:
    """Declare that the caller reads attention's gradients of q, k and v as one matrix if they lie side by side."""
    before = _read_at_once.set(True)
    try:
        yield
    finally:
        _read_at_once.reset(before)


def apart() -> bool:
    """Return whether gradients get separate memory in this context; torch.compile expects separate memory."""
    return torch.compiler.is_compiling() or not _read_at_once.get()


def room(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate dq, dk, dv as empty_like; as views of one (B, T, 3, H, D) if q, k, v (B, H, T, D) are such views.

    Otherwise a copy would join them.
    """
    batch, heads, rows, width = q.shape
    if not _side_by_side(q, k, v):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dq, dk, dv = q.new_empty(batch, rows, 3, heads, width).permute(2, 0, 3, 1, 4).unbind()
    return dq, dk, dv


def _side_by_side(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether q, k and v (B, H, T, D) are views of one (B, T, 3, H, D)."""
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
