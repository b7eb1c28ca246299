"""Weights that begin all alike, moved for a check: a norm's ones, a bias's zeros, a gate that is closed.

Where a norm's weight is 1 a step that does not multiply by it is right. Behind a last weight of zeros, as of an adapter, all
gradients are 0, and float64 tells nothing of them. The step and its references move the same weights by the same numbers.
"""

import contextlib
import zlib
from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn

from te_bench.training.parallel import SINGLE
from te_bench.training.step import TrainStep
from te_bench.training.undisturbed import expanded, undisturbed

SHARE = 0.5  # of the value, at most; it keeps its sign, for a model may take its root
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FROM_ZERO = 0.035  # at most: as far as GPT-2's weights lie apart, a standard deviation of 0.02


@torch.no_grad()
def move(model: nn.Module, seed: int, leave: Container[str] = ()) -> dict[nn.Parameter, Tensor]:
    """Move every parameter whose elements are alike but those named in `leave`. Return {parameter: its value before}, ().

    A single number that is not 0 stays: it has nothing to be alike to. name and seed decide over the numbers.
    """
    begun = {}
    for name, parameter in model.named_parameters():
        if name in leave or expanded(parameter) or (begins := _alike(parameter)) is None:
            continue
        generator = torch.Generator().manual_seed(seed << 32 | zlib.crc32(name.encode()))  # alike on all devices
        drawn = (2 * torch.rand(parameter.shape, generator=generator) - 1).to(parameter.device)
        parameter.copy_(begins + drawn * (SHARE * begins.abs() if begins else FROM_ZERO))
        begun[parameter] = begins
    return begun


def _alike(parameter: Tensor) -> Tensor | None:
    """Return the number that all elements are, or None."""
    if parameter.dtype not in FLOATS or not parameter.numel():
        return None
    least, most = parameter.detach().aminmax()
    if least != most or not least.isfinite() or (parameter.numel() == 1 and least):
        return None
    return least


@contextlib.contextmanager
def moved(step: TrainStep, seed: int, leave: Container[str] = ()) -> Iterator[None]:
    """Move them inside, and leave the step as it was, its recipe's scales too; over several ranks none is moved."""
    if step.parallel is not SINGLE:
        yield
        return
    with undisturbed(step.model):
        begun = move(step.model, seed, leave)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in begun.items():
                    parameter.copy_(value.expand_as(parameter))
