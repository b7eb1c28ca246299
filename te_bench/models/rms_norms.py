"""RMSNorms of transformers, found by trial: nearly every family has a class of its own, and most compute the same."""

import inspect
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from te_bench.models import by_trial

ROWS = 4  # of a trial
SCALES = (1.0, 1000.0)  # of its inputs, besides one at which eps shows


def eps(layer: Any) -> Any:
    """Return a norm's eps, under either of its names; None without one."""
    return layer.variance_epsilon if hasattr(layer, "variance_epsilon") else getattr(layer, "eps", None)


@torch.no_grad()
def offset(layer: nn.Module) -> int | None:
    """Return c for a module of transformers that computes (c + weight) x / sqrt(mean(x^2) + eps), 0 or 1; else None.

    It has no other tensor, and its forward no other argument, such as a gate.
    """
    cls, small = type(layer), eps(layer)
    if not by_trial.is_of_transformers(layer):
        return None
    others = [*layer._modules, *layer._buffers, *(layer._parameters.keys() ^ {"weight"})]
    if others or isinstance(small, bool) or not isinstance(small, int | float) or small < 0:
        return None
    own = layer._parameters["weight"]
    if own is None or own.dim() != 1 or len(inspect.signature(cls.forward).parameters) != 2:
        return None
    with unset_fake_temporarily():  # fake tensors have no numbers to compare
        drawn = by_trial.drawn()
        weight = nn.Parameter(torch.randn(len(own), **drawn))
        scales = (*SCALES, small**0.5) if small else SCALES
        x = torch.cat([scale * torch.randn(ROWS, len(own), **drawn) for scale in scales])
        y = by_trial.answer(layer, {"weight": weight}, x)
        if y is None or y.shape != x.shape:
            return None
        unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + small)
        return next((c for c in (0, 1) if torch.allclose(y, (c + weight) * unit)), None)
