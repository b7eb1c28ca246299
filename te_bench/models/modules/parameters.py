"""Create and initialise modules' parameters."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def factory(device: torch.device | str | None, params_dtype: torch.dtype | None) -> dict[str, Any]:
    """Return device and dtype of new parameters: as in Transformer Engine, the GPU if there is one, unless given."""
    if device is None:
        chosen = torch.get_default_device()
        device = "cuda" if chosen.type == "cpu" and torch.cuda.is_available() else chosen
    return {"device": torch.device(device), "dtype": params_dtype or torch.get_default_dtype()}


def materialise(module: nn.Module) -> None:
    """Move the module's own parameters off the meta device, uninitialised."""
    device = factory(None, None)["device"]
    for name, p in module.named_parameters(recurse=False):
        if p.is_meta:
            made = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
            vars(made).update(vars(p))  # attributes that others set
            module.register_parameter(name, made)


Tracker = Callable[[], Any] | None


def fork_rng(tracker: Tracker, name: str | None = None) -> contextlib.AbstractContextManager[Any]:
    """Draw random numbers from a tracker's generator (Megatron-LM's), by name or its default; None: torch's."""
    if tracker is None:
        return contextlib.nullcontext()
    fork: contextlib.AbstractContextManager[Any] = tracker().fork(*(() if name is None else (name,)))
    return fork


def default_init(weight: Tensor) -> Tensor:
    """N(0, 0.023): Transformer Engine's initialisation, not torch.nn.Linear's."""
    return nn.init.normal_(weight, mean=0.0, std=0.023)


def stack(weights: Sequence[Tensor]) -> Tensor:
    """Stack matrices (n, K) of one dtype, without a graph, and without a copy if they already lie so in memory."""
    first, rows = weights[0].detach(), sum(len(w) for w in weights)
    end = first.storage_offset()
    for w in weights:
        there = w.is_contiguous() and w.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not there or w.dtype is not first.dtype or w.storage_offset() != end:
            return torch.cat([w.detach() for w in weights])
        end += w.numel()
    return first.as_strided((rows, first.shape[1]), first.stride())
