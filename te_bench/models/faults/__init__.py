"""Recipes that are wrong in one way each, on purpose: what a verdict on convergence must catch to be believed.

A fault is a file with FAULT: recipe -> the same recipe, wrong. It is wrong on every device, in every execution mode and
behind every fused kernel, for it overrides what the recipe itself answers.
"""

import dataclasses
from dataclasses import dataclass

from te_bench import plugins
from te_bench.models.recipe import DelayedScaling, Recipe

_classes: dict[tuple[type[Recipe], type[Recipe]], type[Recipe]] = {}


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong: a class that stands between a recipe's own class and its settings.

    One that overrides quantize is asked by it alone (Recipe.__init_subclass__): no fused cast goes past it.
    of_fp8: of scales or formats of FP8; of_kept_scales: of the scales that a recipe keeps from step to step.
    """

    wrong: type[Recipe]
    of_fp8: bool = False
    of_kept_scales: bool = False

    def __call__(self, recipe: Recipe) -> Recipe:
        """The recipe with its settings, and the methods of `wrong` before its own. Equal for equal recipes.

        Raises ValueError for a recipe that has not what is to be wrong.
        """
        kind, name = type(recipe), self.wrong.__module__.rpartition(".")[2]
        if self.of_fp8 and recipe.by_half_gemms:
            raise ValueError(
                f"{name}: {kind.__name__} multiplies in half precision, without scales or FP8; take flushed_gradients"
            )
        if self.of_fp8 and recipe.bf16_wgrad:
            raise ValueError(f"{name}: wgrad of {kind.__name__}(bf16_wgrad=True) has no scales; leave bf16_wgrad out")
        if self.of_kept_scales and not isinstance(recipe, DelayedScaling):
            raise ValueError(f"{name}: {kind.__name__} keeps no scale from step to step; take delayed_scaling")
        key = self.wrong, kind
        if key not in _classes:
            _classes[key] = type(f"{self.wrong.__name__}{kind.__name__}", key, {})
        return _classes[key](**{f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)})


_family = plugins.Family(__name__, "FAULT", Fault)
names, load = _family.names, _family.load
