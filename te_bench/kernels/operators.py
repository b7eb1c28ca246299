"""Shared code of the torch operators around kernels."""

from typing import Any

import torch
from torch import Tensor


def without_none(x: Tensor, *tensors: Tensor | None) -> Any:
    """Return the tensors, with an empty one of x's dtype for None, which an operator cannot return."""
    return tuple(x.new_empty(0) if tensor is None else tensor for tensor in tensors)


def with_all(cast: dict[str, Any], *written: str) -> dict[str, Any]:
    """Return cast, plus None for written tensors that are missing: an operator's mutated arguments have no defaults."""
    return dict.fromkeys(written) | cast


def takes_two_steps(dtype: torch.dtype, rows: int, columnwise: bool) -> bool:
    """Return whether a cast needs a separate kernel: fused ones work on pairs of half-precision rows."""
    return dtype is torch.float32 or (columnwise and rows % 2 == 1)
