"""What torch.compile is told of functions, without importing it: that takes nearly as long as importing torch."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """torch.compiler.assume_constant_result: the function is called once, while a graph is traced."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: torch.compiler.disable(function, recursive=True), which imports the compiler at the function's first call.
untraced = torch._compile._disable_dynamo
