"""How a training step calls a user's module, and where it finds the loss in the result."""

import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.models.sources import Refused

Forward = Callable[[nn.Module, Tensor, Tensor], Any]  # called with (module, inputs, targets)

TARGETS = ("targets", "target", "labels", "label", "y")


def forward_of(name: str, module: nn.Module) -> Forward:
    """Return a callable that gives a factory's module the inputs, and the targets if its forward takes them.

    Raises ValueError for a forward that needs more.
    """
    others, named = list(inspect.signature(module.forward).parameters.values())[1:], parameter_of_targets(module)
    needed = [p.name for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [need for need in needed if need != named]
    if unknown:
        raise Refused(
            f"{name}: its forward needs {unknown[0]!r} beside its inputs, and te-bench has targets alone, for a "
            f"parameter called {', '.join(TARGETS[:-1])} or {TARGETS[-1]}: give it that name or a default, or wrap the "
            "module, with --inputs and --loss where it has inputs or a loss of its own"
        )
    if named is not None:
        return lambda model, x, y: model(x, **{named: y})
    return lambda model, x, y: _logits(name, model(x), y)


def parameter_of_targets(module: nn.Module) -> str | None:
    """Return the name of the parameter by which a factory's module takes targets; None if it takes none."""
    others = list(inspect.signature(module.forward).parameters)[1:]
    return next((name for name in others if name in TARGETS), None)


def gives_logits(module: nn.Module, inputs: Tensor, targets: Tensor) -> bool:
    """Return whether the module maps inputs alone to logits alone, so that the caller computes the loss."""
    return parameter_of_targets(module) is None and _are_logits(module(inputs), targets)


def judged(path: str, judge: Callable[[Any, Tensor], Any]) -> Forward:
    """Return a callable: the module's output on the inputs, judged by the user's loss function at `path`."""

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        loss = judge(model(x), y)
        if not _is_loss(loss):
            raise Refused(f"{path}: it returned {shown(loss)}; return the loss, a floating-point tensor ()")
        return loss

    return forward


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def _are_logits(value: Any, targets: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() > 1
        and value.shape[:-1] == targets.shape
        and not targets.is_floating_point()
    )


def _logits(name: str, out: Any, targets: Tensor) -> Any:
    """Return the logits in the output of a forward without targets; it has no loss.

    A scalar beside the logits is a penalty, such as a mixture of experts'.
    """
    if not isinstance(out, tuple | list):
        return out
    tensors = [x for x in out if isinstance(x, Tensor)]
    logits = [x for x in tensors if _are_logits(x, targets)]
    if len(logits) == 1 or len(tensors) == 1:
        return (logits or tensors)[0]
    shape = ", ".join(map(str, targets.shape))
    many = f"{len(logits)} tensors that could be logits ({shape}, V)" if logits else f"no logits ({shape}, V)"
    raise Refused(f"{name}: its forward returned {shown(out)} with {many}: give --loss package.module:function")


def loss_of(name: str, out: Any, targets: Tensor) -> Tensor:
    """Return the loss in a model's output. Raises ValueError if there is none."""
    if isinstance(out, Tensor):
        if _is_loss(out):
            return out
        if _are_logits(out, targets):
            return F.cross_entropy(out.flatten(0, -2).float(), targets.flatten())
    elif isinstance(out, dict) and isinstance(out.get("loss"), Tensor):
        return loss_of(name, out["loss"], targets)
    elif isinstance(getattr(out, "loss", None), Tensor):
        return loss_of(name, out.loss, targets)
    elif isinstance(getattr(out, "logits", None), Tensor):
        return loss_of(name, out.logits, targets)
    elif isinstance(out, tuple | list):
        tensors = [x for x in out if isinstance(x, Tensor)]
        losses = [x for x in tensors if _is_loss(x)]
        if len(losses) > 1:
            many = f"{len(losses)} scalars that could be the loss"
            raise Refused(f"{name}: its forward returned {shown(out)} with {many}: give --loss package.module:function")
        if tensors:
            return loss_of(name, (losses or tensors)[0], targets)
    logits = "" if targets.is_floating_point() else f" nor logits ({', '.join(map(str, targets.shape))}, V)"
    raise Refused(f"{name}: its forward returned {shown(out)}, no loss{logits}: give --loss package.module:function")


def shown(value: Any) -> str:
    """Describe a value in an error message."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
