"""How a fault gets into a recipe: as a class between the recipe's own class and its settings."""

import dataclasses

from te_bench.models.recipe import DelayedScaling, Recipe


def refuse_half(fault: str, recipe: Recipe) -> None:
    """Raise ValueError for a recipe some of whose operands are half precision's: no scale and no FP8 format is in them."""
    if recipe.bf16_wgrad:
        raise ValueError(
            f"{fault}: wgrad of {type(recipe).__name__}(bf16_wgrad=True) has no scales; leave bf16_wgrad out"
        )
    if recipe.by_half_gemms:
        raise ValueError(
            f"{fault}: {type(recipe).__name__} multiplies in half precision, without scales or FP8; take flushed_gradients"
        )


_classes: dict[tuple[type[Recipe], type[Recipe]], type[Recipe]] = {}


def planted(fault: type[Recipe], recipe: Recipe, *, keeps_scales: str | None = None) -> Recipe:
    """The recipe with its settings, and the methods of `fault` before its own. Equal for equal recipes.

    A fault that overrides quantize is asked by it alone (Recipe.__init_subclass__): no fused cast goes past it.
    `keeps_scales`: the name of a fault of the scales that a recipe keeps; raises ValueError for one that keeps none.
    """
    if keeps_scales is not None and not isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"{keeps_scales}: {type(recipe).__name__} keeps no scale from step to step; take delayed_scaling"
        )
    key = fault, type(recipe)
    if key not in _classes:
        _classes[key] = type(f"{fault.__name__}{type(recipe).__name__}", key, {})
    return _classes[key](**{f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)})
