"""What the layers made of te_bench's own modules share: the recipe and the context of their forward pass."""

import contextlib
import dataclasses
from collections.abc import Iterator

import te_bench.models as te
from te_bench.models import recipe as recipes
from te_bench.models.quickstart import Context, LayerConfig


def recipe_of(p: LayerConfig) -> recipes.Recipe | None:
    """The recipe with the settings asked for. Raises ValueError for a setting that it has not."""
    if p.recipe is None:
        return None
    recipe = recipes.load(p.recipe)
    legal = [f.name for f in dataclasses.fields(recipe)]
    for name in p.settings:
        if name not in legal:
            raise ValueError(f"the recipe {p.recipe} has no setting {name!r}. Its settings: {', '.join(legal)}.")
    return dataclasses.replace(recipe, **p.settings)


def unsupported(p: LayerConfig) -> str | None:
    recipe = recipe_of(p)
    for end in ("first", "last"):
        if recipe is not None and (share := getattr(recipe, f"bf16_{end}")):
            return f"bf16_{end} {share:.3g}: a layer by itself is none of a model's {end} blocks; leave it at 0"
    return None if recipe is None else recipe.unsupported(p.device, p.capability)


def context(p: LayerConfig) -> Context:
    """FP8 as the recipe says, and the attention kernel, entered anew for each forward pass."""
    recipe = recipe_of(p)

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        kernel = te.attention_kernel(p.attention) if p.part == "layer" else contextlib.nullcontext()
        with kernel, te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            yield

    return enter
