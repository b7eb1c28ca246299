"""Try what a module of transformers computes: its class's forward, on a CPU, with drawn parameters."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def drawn() -> dict[str, Any]:
    """Return the arguments of torch.randn for a trial: float32 on a CPU, the same in each trial."""
    return {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu", "dtype": torch.float32}


def is_of_transformers(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith("transformers.")


def answer(
    layer: nn.Module, parameters: Mapping[str, nn.Parameter | None], x: Tensor, **settings: Any
) -> Tensor | None:
    """Return what the layer's class answers to x with these parameters and attributes; None if it raises or is no tensor."""
    shell = copy.copy(layer)
    shell.__dict__ |= settings
    shell._parameters = dict(parameters)
    try:
        y = type(layer).forward(shell, x)
    except Exception:  # whatever it raises, it computes something else
        return None
    return y if isinstance(y, Tensor) else None
