"""Linears of transformers, found by trial: a subclass of nn.Linear that writes x W^T + b in its own way is one."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

ROWS, IN, OUT = 4, 8, 6  # of a trial


@torch.no_grad()
def is_plain(layer: nn.Linear) -> bool:
    """Return whether this subclass of transformers computes x W^T + b, of numbers up to 10000, in training and without."""
    cls = type(layer)
    if not cls.__module__.startswith("transformers."):
        return False
    with unset_fake_temporarily():  # fake tensors have no numbers to compare
        drawn: dict[str, Any] = {
            "generator": torch.Generator("cpu").manual_seed(0),
            "device": "cpu",
            "dtype": torch.float32,
        }
        shell = copy.copy(layer)
        shell.__dict__ |= {"in_features": IN, "out_features": OUT}
        weight, bias = torch.randn(OUT, IN, **drawn), None if layer.bias is None else torch.randn(OUT, **drawn)
        shell._parameters = {"weight": nn.Parameter(weight), "bias": None if bias is None else nn.Parameter(bias)}
        x = torch.cat([scale * torch.randn(ROWS, IN, **drawn) for scale in (1.0, 10000.0)]).unflatten(0, (2, ROWS))
        for shell.training in (True, False):
            try:
                y = cls.forward(shell, x)
            except Exception:  # whatever it raises, it computes something else
                return False
            if (
                not isinstance(y, Tensor)
                or y.shape != (2, ROWS, OUT)
                or not torch.allclose(y, F.linear(x, weight, bias))
            ):
                return False
    return True
