"""Gradient checkpointing of any transformer: its blocks keep their inputs alone, and compute again in the backward pass.

checkpoint_blocks(model)    before the step is made; a third more arithmetic for a fraction of the activations
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_bench.models import fp8
from te_bench.models.dropout import rates


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """A transformer's blocks: the members of its outermost lists that have modules of their own.

    A list in a list is no member, as nobody calls it: its members are. A lone activation may overwrite what it is given.
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


def checkpoint_blocks(model: nn.Module) -> int:
    """Let each block go by te.checkpoint, in FP8 with the scales of the first time; returns how many there are.

    Parameters keep their names. Random numbers are drawn again as they were. A CUDA graph cannot hold that: where no rate of
    dropout is found none are drawn in a capture. A pass with gradients fills no cache of keys and values, as transformers'
    own checkpointing has it. Raises ValueError for a model without a list of blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no nn.ModuleList of blocks whose activations could be dropped")
    random = any(True for _ in rates(model))
    for block in blocks:
        block.forward = functools.partial(_again, block.forward, random)
    return len(blocks)


def _again(forward: Callable[..., Any], random: bool, *args: Any, **kwargs: Any) -> Any:
    """random: whether a rate of dropout was found. A model may keep one elsewhere, in its config say."""
    if torch.is_grad_enabled():  # a cache would get the keys of the second time, too
        args = tuple(map(_unless_cache, args))
        kwargs = {name: _unless_cache(value) for name, value in kwargs.items()}
    captured = (
        not torch.compiler.is_compiling() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )
    return fp8.checkpoint(forward, *args, preserve_rng_state=random or not captured, **kwargs)


def _unless_cache(value: Any) -> Any:
    """What a block is given; None for a cache of keys and values of transformers."""
    return None if not isinstance(value, Tensor) and hasattr(value, "get_seq_length") else value
