"""Recipes, and a model that trains under them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import recipe

RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=3),
    "current": recipe.Float8CurrentScaling(),
    "row": recipe.RowwiseScaling(),
    "row, bf16 wgrad": recipe.RowwiseScaling(bf16_wgrad=True),
    "block": recipe.Float8BlockScaling(),
    "none": None,
}


def model(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        te.LayerNormMLP(32, 48, device=device),
        te.LayerNormLinear(32, 32, device=device),
        te.Linear(32, 32, device=device),
    )


def train(
    layers: nn.Module, forward: Callable[[Tensor], Tensor], asked: recipe.Recipe | None, steps: int = 4
) -> list[Tensor]:
    """Everything that a training step leaves behind, state included."""
    found: list[Tensor] = []
    device = next(layers.parameters()).device
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = (torch.randn(8, 32, generator=generator) * 3.0**step).to(device).requires_grad_()
        with te.autocast(enabled=asked is not None, recipe=asked):
            loss = forward(x).square().mean()
        layers.zero_grad()
        loss.backward()
        assert x.grad is not None
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in layers.parameters() if p.grad is not None)]
        found += [value.clone() for key, value in layers.state_dict().items() if "fp8" in key]
    return found
