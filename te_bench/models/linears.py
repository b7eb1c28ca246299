"""Linears of transformers, found by trial: a subclass of nn.Linear that writes x W^T + b in its own way is one."""

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from te_bench.models import by_trial

ROWS, IN, OUT = 4, 8, 6  # of a trial


@torch.no_grad()
def is_plain(layer: nn.Linear) -> bool:
    """Return whether this subclass of transformers computes x W^T + b, of numbers up to 10000, in training and without."""
    if not by_trial.is_of_transformers(layer):
        return False
    with unset_fake_temporarily():  # fake tensors have no numbers to compare
        drawn = by_trial.drawn()
        weight = nn.Parameter(torch.randn(OUT, IN, **drawn))
        bias = None if layer.bias is None else nn.Parameter(torch.randn(OUT, **drawn))
        x = torch.cat([scale * torch.randn(ROWS, IN, **drawn) for scale in (1.0, 10000.0)]).unflatten(0, (2, ROWS))
        right = F.linear(x, weight, bias)
        for training in (True, False):
            settings = {"in_features": IN, "out_features": OUT, "training": training}
            y = by_trial.answer(layer, {"weight": weight, "bias": bias}, x, **settings)
            if y is None or y.shape != right.shape or not torch.allclose(y, right):
                return False
    return True
