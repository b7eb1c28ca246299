"""Launch a Triton kernel again without inspecting its arguments again.

Triton's JIT types, specialises and hashes every argument at each launch, three times the host time of a compiled
kernel's own runner (Triton 3.6). Here the caller gives a key of everything that the compiled kernel depends on.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_guards: Any = torch._C._dynamo.guards
GRID_Y = 65535  # CUDA's largest second dimension of a grid
KEPT = 4096  # compiled kernels by key; bounded, because lengths may never repeat
_compiled: dict[Hashable, Any] = {}
_PLAIN = frozenset((int, float, bool, type(None)))  # types of kernel arguments other than tensors


def launch(
    kernel: Any,
    grid: int,
    key: tuple[Hashable, ...],
    device: int,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    grid_y: int = 1,
) -> None:
    """Call kernel[(grid, grid_y)](*args, **constants); num_warps and num_stages are among the constants.

    key must distinguish all that Triton compiles separately: tensors' dtypes, which are None, which pointers are not
    multiples of 16 bytes (`traits`); integers by value; every constant. Entries implied by others can be left out, and
    so can floats, which must be floats: Triton would specialise an integer. args are the kernel's leading arguments in
    order, constants the rest by name. device: the tensors' get_device(), negative on a CPU, where Triton's interpreter
    caches nothing. If it is not the current device, it becomes that for the launch, because Triton launches on the
    current one. grid_y: at most GRID_Y.
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
    # Pass addresses, not tensors: Triton would query the driver about each tensor's address.
    values = [*args]
    for i in pointers:
        values[i] = values[i].data_ptr()
    run(grid, grid_y, 1, stream, function, metadata, None, None, None, *values, *rest)


def forget() -> None:
    """Compile all later launches anew, after a change that no key shows."""
    _compiled.clear()


def allocator(device: int) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Return f(shape, strides, dtype) -> an uninitialised tensor on `device` (a get_device(); negative is a CPU).

    If possible it is the function that torch.compile's code calls, without the dispatcher: half the host time of
    torch.empty_strided (torch 2.13), from the same allocator.
    """
    if device < 0:
        return _guards._empty_strided_cpu
    if device == torch._C._cuda_getDevice():
        return _guards._empty_strided_cuda  # on the current device, whatever the tensor's
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def traits(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """Return key entries for what Triton specialises in tensors: dtype and alignment, or None."""
    return tuple([None if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors])


def rows_contiguous(x: Tensor) -> Tensor:
    """Return x (..., N), or a copy if its rows are not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
