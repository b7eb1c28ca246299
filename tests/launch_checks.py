"""What tests of launchers' keys share: what Triton would compile apart never goes by the same key."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

HOPPER = make_backend(GPUTarget("cuda", 90, 32))


@functools.cache
def binder(kernel: Any) -> Any:
    """What Triton's JIT makes of a kernel's arguments before it looks for a compiled one."""
    jit = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    return create_function_from_signature(jit.signature, jit.params, HOPPER)


class Recorder:
    """In launch's place: asserts that what Triton would compile apart never goes by the same key."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], str] = {}
        self.call: list[str] = []  # what the launches since the last `of` would compile

    def launch(
        self, kernel: Any, grid: int, key: tuple[Any, ...], device: int, args: Any, constants: Any, grid_y: int = 1
    ) -> None:
        assert 0 < grid < 2**31
        assert 0 < grid_y < 2**16, "CUDA's second dimension of a grid"
        _, specialization, options = binder(kernel)(*args, **constants)
        compiled = f"{kernel.__name__} {specialization} {options}"
        assert all(isinstance(value, Tensor) or type(value) in (int, float, bool, type(None)) for value in args)
        assert self.known.setdefault((id(kernel), device, *key), compiled) == compiled
        self.call.append(compiled)

    def of(self, launcher: Callable[..., Any], options: dict[str, Any]) -> list[str]:
        self.call = []
        launcher(**options)
        return self.call
