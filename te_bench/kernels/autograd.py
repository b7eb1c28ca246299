"""What autograd Functions share: a backward pass without a derivative, and the cast of a result."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def cast(made: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a forward pass's result in dtype; of that dtype, the tensor itself.

    torch 2.11 compiles a cast to a tensor's own dtype to a second output, and gives the first a gradient of zero.
    """
    return made if made.dtype is dtype else made.to(dtype)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Run a Function's backward pass without a graph; differentiating its results raises ValueError.

    torch's decorator of this name raises only if an incoming gradient requires grad: a loss's own, 1, does not, and the
    second derivative would silently lack a term.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            made = backward(ctx, *gradients)
        # torch.compile itself refuses second derivatives.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return made
        several = isinstance(made, tuple)
        refused = _Refused.apply(
            *(g if g is None else g.detach().requires_grad_() for g in (made if several else (made,)))
        )
        return refused if several else refused[0]

    return wrapper


class _Refused(torch.autograd.Function):
    """Pass gradients through unchanged, and refuse to differentiate them."""

    @staticmethod
    def forward(ctx: Any, *gradients: Any) -> Any:
        return tuple(g if g is None else g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ValueError(
            "create_graph=True asks for second derivatives, which te-bench's kernels do not have: leave it out, or compute "
            "this part by PyTorch's own modules"
        )
