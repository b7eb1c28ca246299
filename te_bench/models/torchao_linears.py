"""nn.Linears converted by torchao.float8, the peer that computes in FP8 under torch.compile. Imports torch when it does."""

import importlib.util
from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

VERSION = "0.18.0"  # whose convert_to_float8_training and recipe names these are

#: Our name -> torchao's name of its recipe, and the te_bench recipe that does the same arithmetic.
NAMES = {
    "torchao_tensorwise": ("tensorwise", "float8_current_scaling"),
    "torchao_rowwise": ("rowwise", "rowwise_scaling"),
}


def unsupported(device: str, capability: tuple[int, int] | None) -> str | None:
    """Why this machine cannot run it, or None."""
    if importlib.util.find_spec("torchao") is None:
        return f"needs torchao: pip install torchao=={VERSION}"
    if device != "cuda" or capability is None or capability < (8, 9):
        return "needs an NVIDIA GPU of compute capability 8.9 or newer"
    return None


def convert(model: "nn.Module", name: str, leave: Container[str] = ()) -> "nn.Module":
    """The model with its Linears, those named in `leave` apart, computing in FP8 by the recipe NAMES[name], in place."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    converted: nn.Module = convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(NAMES[name][0]),
        module_filter_fn=lambda module, path: path not in leave,
    )
    return converted
