"""Experts of transformers in autocast's precision.

torch.autocast does not reach grouped_mm, by which transformers multiplies experts: with weights in float32 they stay in
float32, group by group, where Linears are in bfloat16.

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
    """Put before the class of a layer's experts: the same products, of operands as autocast casts a Linear's."""

    def forward(self, hidden_states: Tensor, *routing: Any, **named: Any) -> Any:
        own: Any = super()
        device = hidden_states.device.type
        if not torch.is_autocast_enabled(device) or self.config._experts_implementation != USUAL:  # type: ignore[attr-defined]
            return own.forward(hidden_states, *routing, **named)
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        cast = _Cast(self, torch.get_autocast_dtype(device))
        return ALL_EXPERTS_FUNCTIONS[USUAL](cast, hidden_states, *routing, **named)


class _Cast:
    """The experts, whose weights read as autocast's dtype; float64 stays, as autocast leaves it."""

    def __init__(self, experts: Any, dtype: torch.dtype):
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        # No Parameter under torch.func, and where it is parametrized.
        is_weight = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
        return value.to(self._dtype) if is_weight else value


def multiplies(module: Any) -> bool:
    """Whether a module holds experts that transformers' interface multiplies."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts", "_apply_gate"))


def convert(module: Any, undo: contextlib.ExitStack) -> str:
    """Let experts multiply in autocast's precision; returns what they are. Raises ValueError, which says why they stay."""
    if "forward" in vars(module):
        raise ValueError("its forward was replaced")
    if (chosen := module.config._experts_implementation) != USUAL:
        raise ValueError(f"its experts_implementation is {chosen!r}, not {USUAL!r}")
    odd = [size for p in module.parameters() if p.dim() == 3 for size in p.shape[1:] if size % ALIGNED]
    if odd:
        raise ValueError(f"{USUAL} in bf16 needs features in multiples of {ALIGNED}, and it has {odd[0]}")
    mix(module, Experts, undo)
    return "in autocast's precision, by grouped_mm"
