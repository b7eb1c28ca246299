"""Record FP8 numerics: in one extra pass at a trial's end, or during a training without affecting it."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from te_bench.experiments.spec import Trial
from te_bench.models import fp8
from te_bench.models.decoder import NotFused
from te_bench.models.modules.linear import Linear
from te_bench.training.step import TrainStep
from te_bench.training.undisturbed import gradients_apart, undisturbed

COUNTED = ("saturated", "underflowed")
SEED = 0x70726F62  # of the probe's dropout masks, the same for each probe: ASCII "prob"


def of_a_pass(trial: Trial, step: TrainStep, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
    """Return {"numerics": te.numerics} of one extra forward and backward pass, eager and untimed; {} without FP8."""
    if trial.recipe is None:
        return {}
    with fp8.record_numerics():
        with step.region():
            loss = step.model(tokens, targets)
        loss.backward()
    step.model.zero_grad(set_to_none=True)
    return {"numerics": fp8.numerics(step.model)}


def probe(step: TrainStep, tokens: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Return {"amax:MODULE.TENSOR": max |x|, "saturated:...", "underflowed:...": fractions of elements} of a micro-batch.

    tokens and targets (B, T). A non-finite amax is None. Weights, gradients, FP8 state and random numbers are restored bit
    for bit.
    """
    modules = {name: module for name, module in step.model.named_modules() if isinstance(module, Linear)}
    seen: dict[str, tuple[Tensor, int]] = {}
    before = fp8.numerics(step.model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(undisturbed(step.model))
        stack.enter_context(gradients_apart(step.model))
        stack.enter_context(warnings.catch_warnings(action="ignore", category=NotFused))
        for name, module in modules.items():
            stack.enter_context(_watched(name, module, seen))
        torch.manual_seed(SEED)
        with fp8.record_numerics():
            with step.region():
                loss = step.model(tokens, targets) / step.optim.accumulate
            loss.backward()
        after = fp8.numerics(step.model)
    return _figures(seen, before, after)


def _figures(
    seen: dict[str, tuple[Tensor, int]], before: dict[str, Any], after: dict[str, Any]
) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    amaxes = torch.stack([amax for amax, _ in seen.values()]).tolist()
    for (name, (_, count)), amax in zip(seen.items(), amaxes, strict=True):
        module, _, tensor = name.rpartition(".")
        found[f"amax:{name}"] = amax if abs(amax) < float("inf") else None
        for kind in COUNTED:
            earlier = before.get(module, {}).get(tensor, {}).get(kind, 0)
            found[f"{kind}:{name}"] = (after[module][tensor][kind] - earlier) / count
    return found


@contextlib.contextmanager
def _watched(name: str, module: Linear, seen: dict[str, tuple[Tensor, int]]) -> Iterator[None]:
    """Inside, record amax and size of the module's input, weight and grad_output, because not every recipe keeps amaxes.

    Fused blocks run module by module while watched.
    """

    def note(tensor: str, x: Tensor) -> None:
        seen[f"{name}.{tensor}"] = x.detach().abs().amax().float(), x.numel()

    def forward(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        note("input", args[0])
        note("weight", module.split.weight_and_bias(module)[0])

    def backward(_: nn.Module, grads: tuple[Tensor, ...]) -> None:
        note("grad_output", grads[0])

    hooks = [module.register_forward_pre_hook(forward), module.register_full_backward_pre_hook(backward)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
