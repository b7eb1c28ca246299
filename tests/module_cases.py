"""Modules, the recipes they run under, and what tests/fp8_emulation.py makes of both."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from fp8_emulation import Fp8, Function, layernorm_linear, layernorm_mlp, linear, swiglu, transformer_layer
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import recipe

RECIPES: dict[str, tuple[recipe.Recipe, Fp8]] = {
    "delayed": (recipe.DelayedScaling(amax_history_len=4), Fp8(scales={})),
    "delayed_e4m3": (recipe.DelayedScaling(fp8_format=recipe.Format.E4M3, margin=1), Fp8(backward="e4m3", scales={})),
    "current": (recipe.Float8CurrentScaling(), Fp8()),
    "current_e4m3": (recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3), Fp8(backward="e4m3")),
    "current_power_of_two": (recipe.Float8CurrentScaling(power_of_two=True), Fp8(power_of_two=True)),
    "row": (recipe.RowwiseScaling(), Fp8(backward="e4m3", granularity="row", power_of_two=True)),
    "current_bf16_wgrad": (recipe.Float8CurrentScaling(bf16_wgrad=True), Fp8(wgrad=False)),
    "row_exact": (recipe.RowwiseScaling(power_of_two=False), Fp8(backward="e4m3", granularity="row")),
    "block": (recipe.Float8BlockScaling(), Fp8(backward="e4m3", granularity="block", power_of_two=True)),
    "block_exact": (recipe.Float8BlockScaling(power_of_two=False), Fp8(backward="e4m3", granularity="block")),
}
FAMILIES = ("delayed", "current", "row", "block")  # one of each


@dataclass(frozen=True)
class Case:
    make: Callable[..., nn.Module]  # (in_features, **options)
    function: Function
    biased: bool = True  # takes bias=False
    norm: dict[str, Any] | None = None


CASES = {
    "Linear": Case(lambda n, **o: te.Linear(n, 32, **o), linear),
    "LayerNormLinear": Case(lambda n, **o: te.LayerNormLinear(n, 32, **o), layernorm_linear),
    "RMSNormLinear": Case(
        lambda n, **o: te.LayerNormLinear(n, 32, normalization="RMSNorm", zero_centered_gamma=True, **o),
        layernorm_linear,
    ),
    "LayerNormMLP": Case(lambda n, **o: te.LayerNormMLP(n, 80, **o), layernorm_mlp()),
    "RMSNormSwiGLU": Case(
        lambda n, **o: te.LayerNormMLP(
            n, 80, normalization="RMSNorm", zero_centered_gamma=True, activation="swiglu", **o
        ),
        layernorm_mlp(swiglu),
    ),
}


def transformer(device: str = "cpu", **options: Any) -> nn.Module:
    return te.TransformerLayer(48, 96, 3, hidden_dropout=0.0, attention_dropout=0.0, device=device, **options)


TRANSFORMER = Case(lambda n, **o: transformer(**o), transformer_layer(3))


def randomise(module: nn.Module) -> nn.Module:
    """Parameters away from their initial zeros and ones, gamma and biases too."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p)
            p.add_(noise * (0.1 if p.dim() == 2 else 0.5))
    return module


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.named_parameters()}


def results(module: nn.Module, x: Tensor, dy: Tensor, asked: recipe.Recipe | None) -> dict[str, Tensor]:
    """y, dx and parameter gradients of one pass."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    with te.autocast(enabled=asked is not None, recipe=asked):
        y = module(x)
    y.backward(dy.to(y.dtype))
    assert x.grad is not None
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}


def scales(module: nn.Module) -> dict[tuple[str, int], float]:
    """Delayed scales by (role, gemm), as the state dict has them; Transformer Engine's layout."""
    state = module.state_dict()
    found = {}
    for i, value in enumerate(state["fp8_scale_fwd"].tolist()):
        if i % 3 < 2:
            found[("input", "weight")[i % 3], i // 3] = value
    for i, value in enumerate(state["fp8_scale_bwd"].tolist()):
        if i % 2 == 0:
            found["grad_output", i // 2] = value
    return found


def settled(module: nn.Module, x: Tensor, dy: Tensor, name: str) -> tuple[recipe.Recipe, Fp8]:
    """The recipe; delayed scaling's after passes that brought its scales to these data."""
    asked, fp8 = RECIPES[name]
    if fp8.scales is None:
        return asked, fp8
    for _ in range(6):
        results(module, x, dy, asked)
    return asked, replace(fp8, scales=scales(module))
