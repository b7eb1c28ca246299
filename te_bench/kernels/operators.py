"""What the torch operators around several kernels share."""

from typing import Any

import torch
from torch import Tensor


def without_none(x: Tensor, *tensors: Tensor | None) -> Any:
    """The tensors, an empty one of x's dtype in place of None, which an operator cannot return."""
    return tuple(x.new_empty(0) if tensor is None else tensor for tensor in tensors)


def with_all(cast: dict[str, Any], *written: str) -> dict[str, Any]:
    """cast, and None for each tensor that an operator writes to and was not given: such a one may have no default."""
    return dict.fromkeys(written) | cast


def takes_two_steps(dtype: torch.dtype, rows: int, columnwise: bool) -> bool:
    """Where a cast needs a kernel of its own: the fused ones go by pairs of rows, of half precision."""
    return dtype is torch.float32 or (columnwise and rows % 2 == 1)
