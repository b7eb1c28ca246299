"""Passes that leave no trace in a model."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from te_bench.models.modules.fp8_module import Fp8Module


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back, in place, what passes change beside gradients: buffers, what recipes keep, random numbers.

    Delayed scaling keeps its largest amax for 1,024 steps: a training would go on with that of batches it never saw.
    """
    modules = [module for module in model.modules() if isinstance(module, Fp8Module)]
    new = [(module, module.recipe_state()) for module in modules if not module.written()]
    device = next(model.parameters()).device
    changed = [*model.buffers(), *(tensor for module in modules for tensor in module.written())]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), _put_back(changed):
        try:
            yield
        finally:
            for module, loaded in new:
                if module.written():  # what it keeps is made in the first pass
                    module.begin_recipe_state(loaded)


def buffers_kept(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Put back the buffers alone, as a running mean that the next pass would compute by."""
    return _put_back(model.buffers())


@contextlib.contextmanager
def _put_back(changed: Iterable[torch.Tensor]) -> Iterator[None]:
    kept = [tensor for tensor in changed if not tensor.is_meta and not expanded(tensor)]
    saved = [tensor.clone() for tensor in kept]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(kept, saved, strict=True):
                tensor.copy_(value)


def expanded(tensor: torch.Tensor) -> bool:
    """Return whether several elements share memory: no pass can write to such a tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


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
