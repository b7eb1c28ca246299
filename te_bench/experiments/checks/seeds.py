"""Check that numbers are drawn by the trial's seed. Otherwise trials of three seeds are one trial three times."""

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from te_bench.experiments.measurement import CheckFailed
from te_bench.training.step import TrainStep
from te_bench.training.undisturbed import undisturbed

OTHERS = 4  # seeds


def require(what: str, seed: int, draw: Callable[[int], Iterable[Tensor]], given: Sequence[Tensor] = ()) -> None:
    """Raise CheckFailed unless `given` are the first of draw(seed), and another seed changes each tensor.

    what: a plural, for the message. A constant tensor follows no seed. Of a few integers two seeds may draw the same, so
    several others are asked.
    """
    drawn = list(draw(seed))
    if not all(map(torch.equal, given, drawn)):
        raise CheckFailed(f"the {what} are not those of the seed {seed}")
    drawn[: len(given)] = given  # a second copy of large inputs might not fit
    constant = {place for place, x in enumerate(drawn) if x.amin() == x.amax()}
    same = set(range(len(drawn)))
    for other in range(seed + 1, seed + 1 + OTHERS):
        if same - constant or len(same) == len(drawn):
            same = {place for place, x in enumerate(draw(other)) if place in same and torch.equal(x, drawn[place])}
    if same - constant or len(same) == len(drawn):
        raise CheckFailed(f"the {what} do not depend on the seed {seed}")


def require_masks(step: TrainStep, seed: int, inputs: Tensor, targets: Tensor) -> None:
    """Raise CheckFailed if a step whose model has dropout finds one loss and one set of gradients whatever the seed.

    The loss alone may be rounded to the same number. Norms are rounded, for kernels may add in any order. A captured step
    keeps a copy of its weights meanwhile; where there is no room for it, nothing is said.
    """

    def found(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        loss, gradients = step.gradients(inputs, targets)
        return [torch.tensor([loss, *(x.norm().item() for x in gradients.values())]).bfloat16()]

    with undisturbed(step.model), contextlib.suppress(torch.OutOfMemoryError):
        require("masks of dropout", seed, found)
