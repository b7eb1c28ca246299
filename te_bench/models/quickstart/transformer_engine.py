"""Transformer Engine's own TransformerLayer, or its LayerNormMLP; its recipes by te_bench's names."""

import contextlib

import torch
from torch import nn

from te_bench.models.peers import transformer_engine as theirs
from te_bench.models.quickstart import PARTS, Context, Layer, LayerConfig, te_layer


def unsupported(p: LayerConfig) -> str | None:
    if p.recipe is not None and p.recipe not in theirs.RECIPES:
        return f"Transformer Engine has no {p.recipe}: {', '.join(theirs.RECIPES)}"
    if reason := theirs.lacks(p.device):
        return reason
    # Transformer Engine selects by itself; the profiler checks which kernel ran.
    if p.part == "mlp" or p.attention in ("cudnn", "flash"):
        return None
    return f"attention {p.attention}: Transformer Engine has cudnn and flash"


def build(p: LayerConfig) -> nn.Module:
    from transformer_engine import pytorch

    return te_layer.make(pytorch, p, device=torch.get_default_device())


def context(p: LayerConfig) -> Context:
    return contextlib.nullcontext if p.recipe is None else theirs.autocast_of(p.recipe, p.settings)


LAYER = Layer(
    build=build,
    unsupported=unsupported,
    context=context,
    names=te_layer.WITH_NORMS_OF_HEADS,
    own_attention=True,
    parts=PARTS,
)
