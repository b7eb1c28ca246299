"""The plain_sdpa layer with its Linears converted by torchao.float8."""

import importlib.util

from torch import nn

from te_bench.models.layer import LayerConfig, plain_sdpa

VERSION = "0.18.0"  # whose convert_to_float8_training and recipe names these are


def unsupported(p: LayerConfig, recipe: str) -> str | None:
    """Why not; `recipe` is the te_bench recipe that does the same arithmetic."""
    if p.recipe != recipe:
        return f"recipe {p.recipe}: this conversion is {recipe}"
    if p.settings:
        return f"{', '.join(p.settings)}: torchao's recipe has no such setting"
    if importlib.util.find_spec("torchao") is None:
        return f"needs torchao: pip install torchao=={VERSION}"
    problem = p.attention_problem
    if problem.capability is None or problem.capability < (8, 9):
        return "needs an NVIDIA GPU of compute capability 8.9 or newer"
    return None if p.attention != "manual" else "attention manual: choose a kernel"


def build(p: LayerConfig, name: str) -> nn.Module:
    """`name` is torchao's name of its recipe: "tensorwise" or "rowwise"."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layer = plain_sdpa.LAYER.build(p)
    converted: nn.Module = convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(name))
    return converted
