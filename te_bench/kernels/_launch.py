"""Launching a Triton kernel again without looking at its arguments again.

Triton's JIT types, specialises and hashes every argument at each launch: 15 us of the host's time for the 17 of a cast. A
compiled kernel's own runner takes 5 (H200 machine, Triton 3.6, 2026-11-21). The caller says by a key what the compiled
kernel depends on.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

KEPT = 4096  # compiled kernels by key; lengths that never repeat would else fill the memory
_compiled: dict[Hashable, Any] = {}
_PLAIN = frozenset((int, float, bool, type(None)))  # what is no tensor among a kernel's arguments


def launch(
    kernel: Any,
    grid: int,
    key: tuple[Hashable, ...],
    device: int,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    grid_y: int = 1,
) -> None:
    """kernel[(grid, grid_y)](*args, **constants), num_warps and num_stages among the constants.

    key must tell apart all that Triton would compile apart: the dtypes of tensors, which of them are None and which
    pointers are not multiples of 16 bytes (`traits`); integers by value; every constant. What the key's other entries
    decide need not be in it, nor floats, which must be floats: Triton compiles an integer in their place. args are the
    kernel's leading arguments in order, constants the rest by name. device: the tensors' get_device(), negative on a CPU,
    where Triton's interpreter has nothing to keep.
    """
    found = _compiled.get((id(kernel), device, *key))
    if found is None:
        compiled = kernel[(grid, grid_y)](*args, **constants)
        if device >= 0 and compiled is not None:
            if len(_compiled) >= KEPT:
                _compiled.clear()
            named = kernel.arg_names[len(args) :]
            _compiled[id(kernel), device, *key] = compiled, tuple(constants[name] for name in named)
        return
    compiled, rest = found
    stream = torch._C._cuda_getCurrentRawStream(device)
    # Addresses, not tensors: Triton would ask the driver of each tensor whether its address is one.
    values = [value if type(value) in _PLAIN else value.data_ptr() for value in args]
    compiled.run(grid, grid_y, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *rest)


def traits(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """What Triton compiles apart of tensors: dtype and alignment, or that there is none. Entries of a key."""
    return tuple([None if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors])


def rows_contiguous(x: Tensor) -> Tensor:
    """x (M, N), or a copy where the elements of its rows do not follow one another."""
    return x if x.stride(1) == 1 else x.contiguous()
