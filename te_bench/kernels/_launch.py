"""Launching a Triton kernel again without looking at its arguments again.

Triton's JIT types, specialises and hashes every argument at each launch: 15 us of the host's time for the 17 of a cast. A
compiled kernel's own runner takes 5 (H200 machine, Triton 3.6, 2026-11-21). The caller says by a key what the compiled
kernel depends on.
"""

from collections.abc import Hashable
from typing import Any

import torch

_compiled: dict[Hashable, Any] = {}
_PLAIN = frozenset((int, float, bool, type(None)))  # what is no tensor among a kernel's arguments


def launch(
    kernel: Any,
    grid: int,
    key: tuple[Hashable, ...],
    device: int | None,
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """kernel[(grid,)](*args, **constants), num_warps and num_stages among the constants; device: the tensors' index.

    key must tell apart all that Triton would compile apart: the dtypes of tensors, which of them are None and which
    pointers are not multiples of 16 bytes; integers by value; every constant. args are the kernel's leading arguments in
    order, constants the rest by name, in the kernel's order too. device None: Triton's interpreter.
    """
    found = _compiled.get((id(kernel), device, *key))
    if found is None:
        compiled = kernel[(grid,)](*args, **constants)
        if device is not None and compiled is not None:
            named = kernel.arg_names[len(args) :]
            _compiled[id(kernel), device, *key] = compiled, tuple(constants[name] for name in named)
        return
    assert device is not None
    compiled, rest = found
    stream = torch._C._cuda_getCurrentRawStream(device)
    # Addresses, not tensors: Triton would ask the driver of each tensor whether its address is one.
    values = [value if type(value) in _PLAIN else value.data_ptr() for value in args]
    compiled.run(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *rest)
