"""What a training step keeps in this rank's memory, by kind."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_bench.experiments.spec import Trial
from te_bench.training.step import TrainStep, autocast


def of_step(trial: Trial, step: TrainStep, tokens: Tensor, targets: Tensor) -> dict[str, float]:
    """Bytes: weights (and buffers), gradients and states of the optimizer, each of this rank's share, counted.

    Of FP8 also fp8_copies, the weights' that an eager pass keeps for its backward pass, and fp8_operands, the rest in FP8
    that it keeps of these rows. tokens, targets: this rank's rows.
    """
    parameters = list(step.model.parameters())
    states = [value for state in step.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    found = {
        "weights": _bytes([*parameters, *step.model.buffers()]),
        "gradients": _bytes([p for p in parameters if p.requires_grad]),  # each in its parameter's dtype
        "states": _bytes(states),
    }
    if trial.recipe is None:
        return found
    one, two = (
        _kept_in_fp8(trial, step.model, *(x[:1].repeat_interleave(rows, 0) for x in (tokens, targets)))
        for rows in (1, 2)
    )  # what does not grow with the rows is the weights'
    return {**found, "fp8_copies": 2 * one - two, "fp8_operands": (two - one) * len(tokens)}


def _bytes(tensors: list[Tensor]) -> float:
    local = {id(t): t.to_local() if isinstance(t, DTensor) else t for t in tensors}
    return float(sum(t.nbytes for t in local.values()))


def _kept_in_fp8(trial: Trial, model: Any, tokens: Tensor, targets: Tensor) -> float:
    """Bytes in FP8 that autograd keeps from the forward to the backward pass; every rank does both."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.is_floating_point() and t.element_size() == 1:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with hooks, autocast(tokens.device, trial.precision), model.autocast():
        loss = model(tokens, targets)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return float(sum(kept.values()))
