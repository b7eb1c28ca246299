"""What the torch operators around several kernels share."""

from typing import Any

from torch import Tensor


def without_none(x: Tensor, *tensors: Tensor | None) -> Any:
    """The tensors, an empty one of x's dtype in place of None, which an operator cannot return."""
    return tuple(x.new_empty(0) if tensor is None else tensor for tensor in tensors)
