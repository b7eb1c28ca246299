"""A model's attention: by its own backend, and in FP8 in its place under a recipe with fp8_dpa."""

from collections.abc import Callable

from torch import Tensor

from te_bench.kernels.attention import Backend, load
from te_bench.models import fp8
from te_bench.models.modules import attention_kernel

Attend = Callable[..., Tensor]


def by_recipe(own: Backend) -> Attend:
    """The backend's forward; under a recipe with fp8_dpa that of the one of attention_kernel.in_fp8, if `own` has no FP8.

    Raises ValueError, called, for what FP8 attention has not: dropout.
    """
    backends = {name: load(name) for name in attention_kernel.FP8}  # torch.compile can't trace an import

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float = 0.0) -> Tensor:
        recipe, backend = fp8.recipe_of_attention(), own
        if recipe is not None and not own.fp8:
            backend = backends[attention_kernel.in_fp8(q.device.type, recipe.emulate)]
        out: Tensor = backend.forward(q, k, v, causal=causal, scale=scale, dropout=dropout)
        return out

    return attend
