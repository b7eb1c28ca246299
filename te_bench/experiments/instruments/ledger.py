"""Count what a training step keeps in this rank's memory, by kind."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_bench.experiments.problems import StepProblem
from te_bench.experiments.spec import Trial
from te_bench.training.step import TrainStep

MULTIPLE = 16  # FP8 GEMMs need rows in this multiple


def of_step(trial: Trial, step: TrainStep, tokens: Tensor, targets: Tensor) -> dict[str, float]:
    """Return bytes of this rank's weights (with buffers), gradients and optimizer states.

    FP8 steps also have fp8_copies, the weights' FP8 copies that an eager pass keeps for its backward pass, and fp8_operands,
    the other FP8 tensors kept for these rows. Both are absent for a rival, and for one row of a length that cannot be
    halved. tokens, targets: this rank's rows, the most of any pass.
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
    one, two = (_kept_in_fp8(step, *batch) for batch in batches)  # the weights' part does not grow with the tokens
    times = tokens.numel() / batches[0][0].numel()
    return {**found, "fp8_copies": 2 * one - two, "fp8_operands": (two - one) * times}


def _once_and_twice(tokens: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return a batch of some tokens and one of twice as many, both within these; [] if they cannot be halved."""
    if len(tokens) > 1:
        return [(tokens[:rows], targets[:rows]) for rows in (1, 2)]
    if tokens.is_floating_point() or tokens.shape[-1] % (2 * MULTIPLE):
        return []
    return [(tokens[:, : tokens.shape[1] // part], targets[:, : tokens.shape[1] // part]) for part in (2, 1)]


def _bytes(tensors: list[Tensor]) -> float:
    local = {id(t): t.to_local() if isinstance(t, DTensor) else t for t in tensors}
    return float(sum(t.nbytes for t in local.values()))


def _kept_in_fp8(step: TrainStep, tokens: Tensor, targets: Tensor) -> float:
    """Return the FP8 bytes that autograd keeps from the forward to the backward pass; every rank runs both."""
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
