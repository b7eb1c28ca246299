"""Deliberately wrong recipes, each wrong in one way: a convergence verdict must catch them to be credible.

A fault is a file with FAULT: recipe -> the same recipe, wrong. It overrides the recipe's own methods, so it is wrong on
every device, in every execution mode and in every fused kernel.
"""

import dataclasses
from dataclasses import dataclass

from te_bench import plugins
from te_bench.models.recipe import DelayedScaling, Recipe

_classes: dict[tuple[type[Recipe], type[Recipe]], type[Recipe]] = {}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: `wrong` is a class that overrides methods of a recipe's own class.

    If it overrides quantize, fused casts are disabled, so none bypasses it (Recipe.__init_subclass__).
    of_fp8: it concerns FP8 scales or formats; of_kept_scales: it concerns scales kept from step to step.
    """

    wrong: type[Recipe]
    of_fp8: bool = False
    of_kept_scales: bool = False

    def __call__(self, recipe: Recipe) -> Recipe:
        """Return the recipe with its settings and `wrong`'s methods before its own. Equal recipes give equal results.

        Raises ValueError for a recipe without the property that the fault changes.
        """
        kind, name = type(recipe), self.wrong.__module__.rpartition(".")[2]
        if self.of_fp8 and recipe.block_formats:
            raise ValueError(
                f"{name}: {kind.__name__} casts in half precision, without scales or FP8; take flushed_gradients"
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
