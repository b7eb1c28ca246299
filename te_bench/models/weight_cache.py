"""cache_weights: gradient accumulation casts each weight to FP8 once an optimizer step, in models that others call.

    te.convert(model, recipe.DelayedScaling())
    optimizer = torch.optim.AdamW(model.parameters())
    te.cache_weights(model, optimizer)

It replaces is_first_microbatch where nothing passes it on: in transformers' models, its Trainer, Accelerate or
Lightning. The first pass after an optimizer step casts the weights, and later passes reuse them until the next step.
"""

from typing import Any

import torch
from torch import nn

from te_bench.models.modules.fp8_module import Fp8Module


def cache_weights(model: nn.Module, *optimizers: Any) -> None:
    """Keep the FP8 weights of `model` between the steps of `optimizers`, two bytes an element; each step drops them.

    Passes without gradients, traced by torch.compile or captured in a CUDA graph cast as usual. A weight that something
    else changes is cast again, too, unless the change bypasses autograd's versions (`weight.data`). Optimizers are
    torch's, or Accelerate's and Lightning's wrappers. Raises ValueError for a model without FP8 layers, for an argument
    that is no optimizer, and for a trained weight that none of them has.
    """
    layers = [module for module in model.modules() if isinstance(module, Fp8Module)]
    if not layers:
        raise ValueError(
            f"cache_weights: {type(model).__name__} has no FP8 layers: call te.convert(model, recipe) first"
        )
    own = [_unwrap(optimizer) for optimizer in optimizers]
    trained = {id(p) for optimizer in own for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, Fp8Module) and parameter.requires_grad and id(parameter) not in trained:
            raise ValueError(
                f"cache_weights: no optimizer given has {name}, so nothing would say when it changes: make the optimizer "
                "after te.convert and name each one, cache_weights(model, optimizer)"
            )
    for layer in layers:
        layer.cache_weights()

    def forget(*_: Any) -> None:
        for layer in layers:
            layer.forget_weights()

    for optimizer in own:
        optimizer.register_step_post_hook(forget)


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer inside Accelerate's or Lightning's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ValueError(f"cache_weights takes the optimizers that train the model, got {type(optimizer).__name__}")
    return inner
