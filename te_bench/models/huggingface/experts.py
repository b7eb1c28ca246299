"""Experts of transformers in autocast's precision.

torch.autocast does not reach grouped_mm, transformers' GEMM of experts: float32 experts stay in float32, while Linears
compute in bfloat16.

Source: transformers 5.23, integrations/moe.py.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from te_bench.models.grouped_gemm import ALIGNED
from te_bench.models.subclassing import Mixed, mix

USUAL = "grouped_mm"  # transformers' default experts_implementation


class Experts(Mixed):
    """A mixin before the class of a layer's experts: the same GEMMs, with operands cast as in autocast Linears."""

    def forward(self, hidden_states: Tensor, *routing: Any, **named: Any) -> Any:
        own: Any = super()
        device = hidden_states.device.type
        if not torch.is_autocast_enabled(device) or self.config._experts_implementation != USUAL:  # type: ignore[attr-defined]
            return own.forward(hidden_states, *routing, **named)
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        cast = _Cast(self, torch.get_autocast_dtype(device))
        return ALL_EXPERTS_FUNCTIONS[USUAL](cast, hidden_states, *routing, **named)


class _Cast:
    """The experts, with weights read in autocast's dtype; float64 stays, as under autocast."""

    def __init__(self, experts: Any, dtype: torch.dtype):
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        # Under torch.func or parametrization a weight is no Parameter.
        is_weight = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
        return value.to(self._dtype) if is_weight else value


def multiplies(module: Any) -> bool:
    """Return whether a module holds experts that use transformers' interface."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts", "_apply_gate"))


def convert(module: Any, undo: contextlib.ExitStack) -> str:
    """Let experts compute in autocast's precision; returns a description. Raises ValueError with the reason if not."""
    if "forward" in vars(module):
        raise ValueError("its forward was replaced")
    if (chosen := module.config._experts_implementation) != USUAL:
        raise ValueError(f"its experts_implementation is {chosen!r}, not {USUAL!r}")
    odd = [size for p in module.parameters() if p.dim() == 3 for size in p.shape[1:] if size % ALIGNED]
    if odd:
        raise ValueError(f"{USUAL} in bf16 needs features in multiples of {ALIGNED}, and it has {odd[0]}")
    mix(module, Experts, undo)
    return "in autocast's precision, by grouped_mm"
