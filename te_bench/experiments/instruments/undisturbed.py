"""Passes of a step that leave no trace in it."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from te_bench.models.modules.fp8_module import Fp8Module
from te_bench.training.step import TrainStep


@contextlib.contextmanager
def undisturbed(step: TrainStep) -> Iterator[None]:
    """Put back, in place, what passes change beside gradients: buffers, what recipes keep, random numbers.

    Delayed scaling keeps its largest amax for 1,024 steps: a training would go on with that of batches it never saw.
    """
    modules = [module for module in step.model.modules() if isinstance(module, Fp8Module)]
    changed = [*step.model.buffers(), *(tensor for module in modules for tensor in module.written())]
    saved = [tensor.clone() for tensor in changed]
    with torch.random.fork_rng([step.device] if step.device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(changed, saved, strict=True):
                    if not torch.equal(tensor, value):  # others may be read alone, as expanded ones
                        tensor.copy_(value)


@contextlib.contextmanager
def gradients_apart(model: nn.Module) -> Iterator[None]:
    """While inside, parameters have other gradients: a captured graph owns theirs."""
    gradients = [(p, p.grad) for p in model.parameters()]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
