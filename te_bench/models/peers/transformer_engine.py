"""Transformer Engine's recipes and its autocast.

Source: Transformer Engine 2.20.2, pytorch/quantization.py and common/recipe/__init__.py.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from te_bench.models.rivals import missing

#: te_bench's recipes -> its own of the same arithmetic.
RECIPES = {
    "delayed_scaling": "DelayedScaling",
    "float8_current_scaling": "Float8CurrentScaling",
    "float8_block_scaling": "Float8BlockScaling",
}
MODULES = ("transformer_engine", "transformer_engine_torch")  # pure Python, and the extension that it needs
INSTALL = "--no-build-isolation 'transformer_engine[pytorch]'"


def lacks(device: str) -> str | None:
    """Why it does not run on a device of that type, or None."""
    if reason := missing(MODULES, "transformer_engine", INSTALL):
        return reason
    return None if device == "cuda" else "needs an NVIDIA GPU: Transformer Engine does not run on a CPU"


def autocast_of(recipe: str, settings: Mapping[str, Any]) -> Callable[..., AbstractContextManager[Any]]:
    """Its autocast by one of RECIPES with these settings; called for each forward pass, with whether FP8 is enabled."""
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch import autocast

    return functools.partial(autocast, recipe=getattr(recipes, RECIPES[recipe])(**settings))
