"""Launching a Triton kernel again without looking at its arguments again.

Triton's JIT types, specialises and hashes every argument at each launch, three times the host's time of a compiled kernel's
own runner (Triton 3.6). The caller says by a key what the compiled kernel depends on.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_guards: Any = torch._C._dynamo.guards
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
    where Triton's interpreter has nothing to keep. It need not be the current one, which Triton launches on: it becomes
    that for the launch.
    """
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, key, device, args, constants, grid_y)
        return
    found = _compiled.get((id(kernel), device, key))
    if found is None:
        compiled = kernel[(grid, grid_y)](*args, **constants)
        if device >= 0 and compiled is not None:
            if len(_compiled) >= KEPT:
                forget()
            named = kernel.arg_names[len(args) :]
            rest = tuple(constants[name] for name in named)
            pointers = tuple(i for i, value in enumerate(args) if type(value) not in _PLAIN)
            run = compiled, compiled.run, compiled.function, compiled.packed_metadata
            _compiled[id(kernel), device, key] = *run, pointers, rest
        return
    _, run, function, metadata, pointers, rest = found
    stream = torch._C._cuda_getCurrentRawStream(device)
    # Addresses, not tensors: Triton would ask the driver of each tensor whether its address is one.
    values = [*args]
    for i in pointers:
        values[i] = values[i].data_ptr()
    run(grid, grid_y, 1, stream, function, metadata, None, None, None, *values, *rest)


def forget() -> None:
    """Compile anew what is launched from now on, as after a change of what no key tells."""
    _compiled.clear()


def allocator(device: int) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """f(shape, strides, dtype) -> an uninitialised tensor on `device`, a tensor's get_device(); negative is a CPU.

    Where it can it is what torch.compile's own code calls, past the dispatcher: half the host's time of torch.empty_strided
    (torch 2.13). Memory comes from the same allocator.
    """
    if device < 0:
        return _guards._empty_strided_cpu
    if device == torch._C._cuda_getDevice():
        return _guards._empty_strided_cuda  # on the current device, whichever the tensor's is
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def traits(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """What Triton compiles apart of tensors: dtype and alignment, or that there is none. Entries of a key."""
    return tuple([None if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors])


def rows_contiguous(x: Tensor) -> Tensor:
    """x (..., N), or a copy where the elements of its rows do not follow one another."""
    return x if x.stride(-1) == 1 else x.contiguous()
