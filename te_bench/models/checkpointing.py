"""Gradient checkpointing of any transformer: blocks save only their inputs, and recompute in the backward pass.

checkpoint_blocks(model)    before the step is made; a third more arithmetic for a fraction of the activations
"""

import functools
import keyword
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_bench.models import fp8
from te_bench.models.dropout import rates


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return a transformer's blocks: the members of its outermost lists that have submodules.

    A list inside a list is never called: its members count. A lone activation is none: it may overwrite its input.
    """
    listed = isinstance(model, nn.ModuleList | nn.Sequential)
    found: list[nn.Module] = []
    for child in model.children():
        called = listed and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if not called:
            found += blocks_of(child)
        elif any(child.children()):
            found.append(child)
    return found


def expression(model: nn.Module) -> str:
    """Return `blocks_of` as an expression of Python on a `model`: model.layers; "" without blocks."""
    blocks = {id(block) for block in blocks_of(model)}
    lists = [
        (_path(model, name), module)
        for name, module in model.named_modules()
        if any(id(child) in blocks for child in module.children())
    ]
    if not lists:
        return ""
    found = lists[0][0] if len(lists) == 1 else f"({', '.join(f'*{path}' for path, _ in lists)})"
    if all(id(child) in blocks for _, module in lists for child in module.children()):
        return found
    return f"[block for block in {found} if any(block.children())]"


def _path(model: nn.Module, name: str) -> str:
    """Return how Python reaches the submodule of that name from `model`."""
    path, module = "model", model
    for part in filter(None, name.split(".")):
        if part.isidentifier() and not keyword.iskeyword(part):
            path += f".{part}"
        elif part.isdigit() and isinstance(module, nn.ModuleList | nn.Sequential):
            path += f"[{part}]"
        else:
            path += f"[{part!r}]" if isinstance(module, nn.ModuleDict) else f".get_submodule({part!r})"
        module = module.get_submodule(part)
    return path


def checkpoint_blocks(model: nn.Module) -> int:
    """Checkpoint each block by te.checkpoint, recomputing FP8 with the first pass's scales; return their number.

    Parameters keep their names. Random numbers are drawn again as they were. A CUDA graph cannot do that: without a
    dropout rate, none are drawn in a capture. As in transformers' own checkpointing, a pass with gradients fills no
    key/value cache. Raises ValueError for a model without a list of blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no nn.ModuleList of blocks whose activations could be dropped")
    random = any(True for _ in rates(model))
    for block in blocks:
        block.forward = functools.partial(_again, block.forward, random)
    return len(blocks)


def _again(forward: Callable[..., Any], random: bool, *args: Any, **kwargs: Any) -> Any:
    """Run `forward` under te.checkpoint. random: a dropout rate was found; a model may hide one, e.g. in its config."""
    if torch.is_grad_enabled():  # the recomputation would append to a cache, too
        args = tuple(map(_unless_cache, args))
        kwargs = {name: _unless_cache(value) for name, value in kwargs.items()}
    captured = (
        not torch.compiler.is_compiling() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )
    return fp8.checkpoint(forward, *args, preserve_rng_state=random or not captured, **kwargs)


def _unless_cache(value: Any) -> Any:
    """Return a block's argument, or None in place of transformers' key/value cache."""
    return None if not isinstance(value, Tensor) and hasattr(value, "get_seq_length") else value
