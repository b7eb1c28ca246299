"""Transformer Engine's own TransformerLayer, or its LayerNormMLP; its recipes by te_bench's names."""

import contextlib
import importlib.util

import torch
from torch import nn

from te_bench.models.quickstart import PARTS, Context, Layer, LayerConfig, te_layer

RECIPES = {
    "delayed_scaling": "DelayedScaling",
    "float8_current_scaling": "Float8CurrentScaling",
    "float8_block_scaling": "Float8BlockScaling",
}
INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]'"


def unsupported(p: LayerConfig) -> str | None:
    if p.recipe is not None and p.recipe not in RECIPES:
        return f"Transformer Engine has no {p.recipe}: {', '.join(RECIPES)}"
    # The first is pure Python, the second the extension that it needs.
    if any(importlib.util.find_spec(package) is None for package in ("transformer_engine", "transformer_engine_torch")):
        return f"needs transformer_engine: {INSTALL}"
    if p.device != "cuda":
        return "needs an NVIDIA GPU: Transformer Engine does not run on a CPU"
    # Transformer Engine chooses by itself; what ran is held to the name by the profiler.
    if p.part == "mlp" or p.attention in ("cudnn", "flash"):
        return None
    return f"attention {p.attention}: Transformer Engine has cudnn and flash"


def build(p: LayerConfig) -> nn.Module:
    from transformer_engine import pytorch

    return te_layer.make(pytorch, p, device=torch.get_default_device())


def context(p: LayerConfig) -> Context:
    if p.recipe is None:
        return contextlib.nullcontext
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch import fp8_autocast

    recipe = getattr(recipes, RECIPES[p.recipe])(**p.settings)
    return lambda: fp8_autocast(enabled=True, fp8_recipe=recipe)


LAYER = Layer(
    build=build, unsupported=unsupported, context=context, names=te_layer.NAMES, own_attention=True, parts=PARTS
)
