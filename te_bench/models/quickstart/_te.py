"""Shared code of the layers made of te_bench's modules: the recipe and the context of their forward pass."""

import contextlib
from collections.abc import Iterator

import te_bench.models as te
from te_bench.models.quickstart import Context, LayerConfig, recipe_of


def unsupported(p: LayerConfig) -> str | None:
    recipe = recipe_of(p)
    for end in ("first", "last"):
        if recipe is not None and (share := getattr(recipe, f"bf16_{end}")):
            return f"bf16_{end} {share:.3g}: a layer by itself is none of a model's {end} blocks; leave it at 0"
    return None if recipe is None else recipe.unsupported(p.device, p.capability)


def context(p: LayerConfig) -> Context:
    """Return a context, entered anew per forward pass, with the recipe's FP8 and the attention kernel."""
    recipe = recipe_of(p)

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        kernel = te.attention_kernel(p.attention) if p.part == "layer" else contextlib.nullcontext()
        with kernel, te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            yield

    return enter
