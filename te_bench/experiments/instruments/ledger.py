"""What a training step keeps in this rank's memory, by kind."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_bench.experiments.problems import StepProblem
from te_bench.experiments.spec import Trial
from te_bench.training.step import TrainStep

MULTIPLE = 16  # of a product's rows that FP8 GEMMs take


def of_step(trial: Trial, step: TrainStep, tokens: Tensor, targets: Tensor) -> dict[str, float]:
    """Bytes: weights (and buffers), gradients and states of the optimizer, each of this rank's share, counted.

    Of FP8 also fp8_copies, the weights' that an eager pass keeps for its backward pass, and fp8_operands, the rest in FP8
    that it keeps of these rows: not of a rival, nor of one row of a length that does not halve. tokens, targets: this
    rank's rows, more than which no pass has.
    """
    parameters = list(step.model.parameters())
    states = [value for state in step.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    found = {
        "weights": _bytes([*parameters, *step.model.buffers()]),
        "gradients": _bytes([p for p in parameters if p.requires_grad]),  # each in its parameter's dtype
        "states": _bytes(states),
    }
    batches = _once_and_twice(tokens, targets)
    if trial.recipe is None or StepProblem.of(trial).against is not None or not batches:
        return found
    one, two = (_kept_in_fp8(step, *batch) for batch in batches)  # what does not grow with the tokens is the weights'
    times = tokens.numel() / batches[0][0].numel()
    return {**found, "fp8_copies": 2 * one - two, "fp8_operands": (two - one) * times}


def _once_and_twice(tokens: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A batch of some tokens and one of twice as many, both within these; none where there is no half."""
    if len(tokens) > 1:
        return [(tokens[:rows], targets[:rows]) for rows in (1, 2)]
    if tokens.is_floating_point() or tokens.shape[-1] % (2 * MULTIPLE):
        return []
    return [(tokens[:, : tokens.shape[1] // part], targets[:, : tokens.shape[1] // part]) for part in (2, 1)]


def _bytes(tensors: list[Tensor]) -> float:
    local = {id(t): t.to_local() if isinstance(t, DTensor) else t for t in tensors}
    return float(sum(t.nbytes for t in local.values()))


def _kept_in_fp8(step: TrainStep, tokens: Tensor, targets: Tensor) -> float:
    """Bytes in FP8 that autograd keeps from the forward to the backward pass; every rank does both."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.is_floating_point() and t.element_size() == 1:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with hooks, step.region():
        loss = step.model(tokens, targets)
    loss.backward()
    step.model.zero_grad(set_to_none=True)
    return float(sum(kept.values()))
