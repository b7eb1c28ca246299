"""Recipes that are wrong in one way each, on purpose: what a verdict on convergence must catch to be believed.

A fault is a file with FAULT: recipe -> the same recipe, wrong. It is wrong on every device, in every execution mode and
behind every fused kernel, for it overrides what the recipe itself answers.
"""

from collections.abc import Callable

from te_bench import plugins
from te_bench.models.recipe import Recipe

Fault = Callable[[Recipe], Recipe]


def names() -> list[str]:
    return plugins.names(__name__)


def load(name: str) -> Fault:
    """The fault in NAME.py. Raises ValueError for an unknown name."""
    fault: Fault = plugins.load(__name__, name, "FAULT")
    return fault
