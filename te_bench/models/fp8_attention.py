"""A model's attention: its own backend, or an FP8 backend under a recipe with fp8_dpa."""

from typing import Any

from torch import Tensor

from te_bench.kernels.attention import load
from te_bench.models import fp8, kernel_choice


class ByRecipe:
    """Attention by backend `name`; under a recipe with fp8_dpa by kernel_choice.in_fp8, if `name` has no FP8.

    Copies and pickles hold only the name. Raises ValueError for an unknown name and, when called, for dropout in FP8.
    """

    def __init__(self, name: str) -> None:
        self.name, self.own = name, load(name)
        self.in_fp8 = {other: load(other) for other in kernel_choice.FP8}  # torch.compile can't trace an import

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float = 0.0) -> Tensor:
        recipe, backend = fp8.recipe_of_attention(), self.own
        if recipe is not None and not backend.fp8:
            backend = self.in_fp8[kernel_choice.in_fp8(q.device.type, recipe.emulate)]
        out: Tensor = backend.forward(q, k, v, causal=causal, scale=scale, dropout=dropout)
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        return ByRecipe, (self.name,)  # a backend consists of functions, some of which cannot be pickled
