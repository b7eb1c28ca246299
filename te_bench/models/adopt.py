"""Adapt a user's module to training.step.TrainStep: with its loss, and te-bench's precision and kernels.

model = adopt(LlamaForCausalLM(config).to("cuda"), recipe=recipe.DelayedScaling(), parts="all")
step = TrainStep(model, Optim(), precision="fp8", mode="cudagraph", optimizer="triton")
loss = step(tokens, targets)
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from te_bench.models import families, fp8
from te_bench.models.adopted import OWN, Adopted, Made
from te_bench.models.calling import judged
from te_bench.models.conversion_parts import Filter
from te_bench.models.recipe import Recipe
from te_bench.models.sources import Source


def adopt(
    module: nn.Module,
    *,
    recipe: Recipe | None = None,
    parts: str | None = None,
    filter: Filter | None = None,
    loss: Callable[[Any, Tensor], Tensor] | None = None,
) -> Adopted:
    """Convert the module in place and return it as forward(inputs, targets) -> (), its loss; the weights stay at
    `.module`.

    recipe, parts and filter: as te.convert's. loss: (output, targets) -> (), needed if the module returns neither a loss
    nor logits (B, T, V). Targets are the next tokens: nothing is shifted here. A masked language model's targets are its
    labels: the hidden tokens, and -100 elsewhere. Raises ValueError for a module without trained weights, for a forward
    that needs more than inputs and targets, and for what te.convert refuses.
    """
    name = type(module).__name__
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"{name}: it is no nn.Module with weights that are trained; give the model itself")
    if recipe is not None:
        fp8.check_recipe(recipe)
    if filter is not None and recipe is None and parts is None:
        raise ValueError("filter is only for what is converted: give a recipe or parts, too")
    if filter is not None and not callable(filter):
        raise ValueError(f"filter {filter!r} is no function: give one of a layer's name and the layer")
    if loss is not None and not callable(loss):
        raise ValueError(f"loss {loss!r} is no function: give one of the module's output and the targets")
    judge = None if loss is None else judged(getattr(loss, "__name__", "loss"), loss)
    unknown = f"te-bench does not know how to feed {name}: give loss, a function of its output and targets"
    family, forward = families.calling(name, module, judge, unknown)
    if judge is None and family is not None and family.name == "masked":
        forward = families.labelled  # the user hides the tokens
    made = Made(
        source=Source(model=name),
        attention=OWN,
        module=module,
        forward=forward,
        drawn=None,
        vocab=1,
        block=None,
        sequence=None,
        text=False,
    )
    model = Adopted(made, recipe=recipe, parts=parts, filter=filter)
    if filter is not None and recipe is not None and not model.converted:
        raise ValueError("filter leaves no layer for the recipe: it is to say True of what may be in FP8")
    return model
