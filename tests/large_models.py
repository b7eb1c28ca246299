"""What tests of large models share: steps whose weights' FP8 lasts in one layout, or in both."""

from collections.abc import Callable

import torch
from torch import Tensor

from te_bench.models import recipe as recipes
from te_bench.training.data import Batches
from te_bench.training.step import TrainStep

RECIPE = recipes.DelayedScaling(amax_history_len=4)
Limit = Callable[[int], None]


def layouts(step: TrainStep) -> set[bool]:
    """Whether the FP8 weights that an optimizer leaves are there by columns, too."""
    assert step.table is not None
    return {copy.fp8.kept.data_t is not None for copy in step.table.copies.values() if copy.fp8 is not None}


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()


def trained(step: TrainStep) -> list[Tensor]:
    """Losses and gradients of five steps, in which the scales move on between the passes, and weights."""
    found: list[Tensor] = []
    batches = Batches(None, block=16, batch=4, vocab=50, seed=7)
    for number in range(4):
        found.append(step(*batches.at(number)))
    found += step.gradients(*batches.at(4))[1].values()
    return [*found, *(p.detach().clone() for p in step.model.parameters())]
