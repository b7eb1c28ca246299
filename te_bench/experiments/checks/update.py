"""The check of whole steps: what two of them make of the weights, beside AdamW written out in float64.

The check of the gradients asks for gradients; a step that trains has to compute the same, and to update by them.
"""

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments.checks import tolerances
from te_bench.experiments.checks.quantity import Quantity, judge
from te_bench.experiments.checks.tolerances import AGAIN, LOOSEST, MOVED
from te_bench.experiments.measurement import CheckFailed
from te_bench.training.parallel import SINGLE
from te_bench.training.step import Optim, TrainStep
from te_bench.training.undisturbed import undisturbed

UPDATES = 2  # the first tells no beta from another, and no second bias correction from the first
EPS = 1e-8  # AdamW's (Loshchilov and Hutter 2019), as torch has it
#: A rate that no model breaks by in two updates; a trial that is to find out where it breaks is no wrong one.
HIGHEST = 1e-3
ELEMENTS = 2**24  # that are written out at a time
#: Modes whose random numbers come from torch's generator at each pass: the same state draws the same again.
DRAWS_ANEW = ("eager", "compile", "compile-blocks")
#: Copies of each parameter that exist at once: its weights twice, its gradients four times, and two of work.
COPIES = 8
SHARE = 0.5  # of a GPU's free memory, for copies; the steps need the rest


def checked(check: dict[str, Any], step: TrainStep, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """`check` with what two updates of a new step showed, which is left as it was. Raises CheckFailed.

    A step over several ranks, or on a device that is not among tolerances.DEVICES, is not checked. On a GPU as many
    parameters are compared as it has room for copies of, the largest first: to the host copies take minutes.
    """
    if step.parallel is not SINGLE or step.device.type not in tolerances.DEVICES:
        return check
    found = judge(
        "AdamW written out in float64, by the gradients that it was given", _quantities(step, inputs, targets)
    )
    return {**check, "quantities": check["quantities"] + found["quantities"]}


@contextlib.contextmanager
def made(step: TrainStep, calls: Callable[[], int]) -> Iterator[None]:
    """Raise CheckFailed unless the step's own optimizer makes as many updates inside as `calls` says afterwards.

    Not checked: fp16, whose scaler may skip an update; a rank without parameters; devices outside tolerances.DEVICES.
    """
    owned = any(group["params"] for group in step.own_optimizer.param_groups)
    if step.scaler.is_enabled() or step.device.type not in tolerances.DEVICES or not owned:
        yield
        return
    before = _updates(step)
    yield
    found, times = _updates(step) - before, calls()
    if found != times:
        raise CheckFailed(
            f"{found} updates by the step that was checked, and not {times}: another one was timed or seen"
        )


def _updates(step: TrainStep) -> int:
    """Return how many updates the optimizer counts for its bias correction."""
    states = step.own_optimizer.state.values()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def _quantities(step: TrainStep, inputs: Tensor, targets: Tensor) -> list[Quantity]:
    optim = dataclasses.replace(step.optim, learning_rate=min(step.optim.learning_rate, HIGHEST))
    compared = _compared(step)
    weights, given = [_weights(step, compared)], list[dict[str, Tensor]]()
    with _put_back(step, weights[0]):
        for number in range(UPDATES):
            with undisturbed(step.model):
                given.append(_trained(step, inputs, targets.roll(number, 0), compared))
            if number == 0:
                weights.append(_weights(step, compared))
        quantities = []
        for name, parameter in compared.items():
            gradients = [each[name] for each in given if name in each]
            if len(gradients) in (0, UPDATES):  # of experts, an update may choose others
                moments = step.optimizer.state.get(parameter, {}).get("exp_avg", parameter)
                quantities.append(_update(name, parameter, weights[0][name], gradients, optim, moments.dtype))
        # Last, for a look makes copies of the weights anew, which the steps are to have found renewed.
        for number, (found, begun) in enumerate(zip(given, weights, strict=False)):
            _load(step, begun)
            looks = functools.partial(_looked, step, inputs, targets.roll(number, 0), compared)
            if (looked := looks()) is not None:
                error, limit = _apart(found, looked), AGAIN
                if error > limit and (again := looks()) is not None:
                    # Independent errors add up in squares; more than LOOSEST is no gradient.
                    limit = min(math.hypot(limit, _apart(again, looked)), LOOSEST)
                quantities.append(Quantity(f"grad of update {number + 1}", error, limit))
    return quantities


def _compared(step: TrainStep) -> dict[str, Tensor]:
    """{name: parameter} of those that there is room for copies of, in the order of the model."""
    named = dict(step.model.named_parameters())
    room, chosen = _room(step), set[str]()
    for name, parameter in sorted(named.items(), key=lambda one: -one[1].nbytes):
        if COPIES * parameter.nbytes <= room:
            room -= COPIES * parameter.nbytes
            chosen.add(name)
    return {name: parameter for name, parameter in named.items() if name in chosen}


def _room(step: TrainStep) -> float:
    """Return the bytes for copies on the step's device, which has yet to hold moments and gradients where none are."""
    if step.device.type != "cuda":
        return math.inf
    torch.cuda.empty_cache()
    to_come = 0 if step.optimizer.state else 3 * sum(p.nbytes for p in step.model.parameters())
    return SHARE * (torch.cuda.mem_get_info(step.device)[0] - to_come)


def _weights(step: TrainStep, compared: Collection[str]) -> dict[str, Tensor]:
    """{parameter: a copy of it}, of those that are not compared on the host."""
    named = step.model.named_parameters()
    return {name: p.detach().to(p.device if name in compared else "cpu", copy=True) for name, p in named}


@torch.no_grad()
def _load(step: TrainStep, weights: dict[str, Tensor]) -> None:
    for name, parameter in step.model.named_parameters():
        parameter.copy_(weights[name])


@contextlib.contextmanager
def _put_back(step: TrainStep, weights: dict[str, Tensor]) -> Iterator[None]:
    """Leave the weights as given, the rate as it was, and the moments as those of a step that made no update."""
    begun, scaler = bool(step.optimizer.state), copy.deepcopy(step.scaler.state_dict())
    if step.optim.learning_rate > HIGHEST:
        step.set_rate(HIGHEST)
    try:
        yield
    finally:
        if step.optim.learning_rate > HIGHEST:
            step.set_rate(step.optim.learning_rate)
        _load(step, weights)
        for state in step.optimizer.state.values():
            for value in state.values():
                if value.dtype is not torch.int64:  # not the seed
                    value.zero_()
        if not begun and not step.captured:  # a graph has captured where its moments are
            step.optimizer.state.clear()
        if step.scaler.is_enabled():
            step.scaler.load_state_dict(scaler)


def _looked(step: TrainStep, inputs: Tensor, targets: Tensor, compared: Collection[str]) -> dict[str, Tensor] | None:
    """{parameter: its gradient} of a pass that changes nothing; None where its random numbers are its own."""
    if step.table is None and not step.captured:
        step.optimizer.zero_grad(set_to_none=True)
    with undisturbed(step.model):
        before = _random(step)
        given = step.gradients(inputs, targets, records=True)[1]
        found = {name: gradient.clone() for name, gradient in given.items() if name in compared}
        return None if step.mode not in DRAWS_ANEW and not torch.equal(_random(step), before) else found


def _random(step: TrainStep) -> Tensor:
    return torch.cuda.get_rng_state(step.device) if step.device.type == "cuda" else torch.get_rng_state()


def _trained(step: TrainStep, inputs: Tensor, targets: Tensor, compared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One step; {parameter: the gradient that it was updated by}."""
    found: dict[Any, Tensor] = {}

    def look(*_: Any) -> None:
        found.update({p: p.grad.clone() for p in compared.values() if p.grad is not None})

    own = step.table is None and not step.captured
    handle = step.optimizer.register_step_pre_hook(look) if own else None
    try:
        step(inputs, targets)
    finally:
        if handle is not None:
            handle.remove()
    if step.table is not None:
        wanted = set(compared.values())
        found = {p: gradient.clone() for p, gradient in step.table.gradients().items() if p in wanted}
    elif step.captured:  # the graph's own are there after it
        look()
    return {name: found[p] for name, p in compared.items() if p in found}


def _apart(found: dict[str, Tensor], looked: dict[str, Tensor]) -> float:
    """The norm of what differs between the gradients of two passes, over one's; infinite where other parameters have any."""
    if found.keys() != looked.keys():
        return float("inf")
    if not found:
        return 0.0
    norms = [(torch.linalg.vector_norm(looked[n] - g), torch.linalg.vector_norm(looked[n])) for n, g in found.items()]
    differ, whole = (torch.stack(each).double().norm().item() for each in zip(*norms, strict=True))
    return differ / max(whole, 1e-30)


def _update(
    name: str, after: Tensor, before: Tensor, gradients: list[Tensor], optim: Optim, moments: torch.dtype
) -> Quantity:
    """The norm of what the weights are off after the updates; what no gradient reached stays."""
    error, moved, size = 0.0, 0.0, 0.0
    flat = [t.detach().flatten().split(ELEMENTS) for t in (after, before, *gradients)]
    for found, start, *given in zip(*flat, strict=True):
        begun = start.to(found.device).double()
        exact, m, v = begun, torch.zeros_like(begun), torch.zeros_like(begun)
        for number, gradient in enumerate(given, 1):
            g = gradient.to(found.device).double()
            m = optim.beta1 * m + (1 - optim.beta1) * g
            v = optim.beta2 * v + (1 - optim.beta2) * g * g
            decayed = exact * (1 - optim.learning_rate * optim.weight_decay) if after.dim() >= 2 else exact
            root = (v / (1 - optim.beta2**number)).sqrt() + EPS
            exact = decayed - optim.learning_rate * m / (1 - optim.beta1**number) / root
        error += (found.double() - exact).square().sum().item()
        moved += (exact - begun).square().sum().item()
        size += begun.square().sum().item()
    rounded = UPDATES * torch.finfo(after.dtype).eps * size**0.5
    return Quantity(f"update {name}", error**0.5, MOVED[moments] * moved**0.5 + rounded)
