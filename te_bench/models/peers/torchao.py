"""nn.Linears converted by torchao.float8, which computes in FP8 under torch.compile.

Source: torchao 0.18.0, float8/float8_linear_utils.py and float8/config.py.
"""

from collections.abc import Container
from typing import TYPE_CHECKING

from te_bench.models.rivals import Capability, missing

if TYPE_CHECKING:
    from torch import nn

INSTALL = "torchao==0.18.0"  # whose convert_to_float8_training and recipe names these are


def lacks(device: str, capability: Capability) -> str | None:
    """Why this machine cannot run it, or None."""
    if reason := missing(["torchao"], "torchao", INSTALL):
        return reason
    if device != "cuda" or capability is None or capability < (8, 9):
        return "needs an NVIDIA GPU of compute capability 8.9 or newer"
    return None


def convert(model: "nn.Module", recipe: str, leave: Container[str] = ()) -> "nn.Module":
    """The model with its Linears, those named in `leave` apart, in FP8 by torchao's recipe of that name, in place."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    converted: nn.Module = convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda module, path: path not in leave,
    )
    return converted
