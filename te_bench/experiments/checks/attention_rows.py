"""Attention held apart: what a model's own calls of it gave, forward and backward, against float64, row by row.

In a gradient of the whole model a row that saw the wrong keys is one of a thousand, and FP8 of all Linears is louder.
Attention itself rounds far less, and here it gets what it gets in the model: the layer's q, k, v and dO, as they lie, in an
eager pass.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_bench.experiments.checks import large, rounding
from te_bench.experiments.checks.quantity import Quantity
from te_bench.experiments.checks.tolerances import ACCUMULATED, ATTENTION_ROWS
from te_bench.kernels import attention
from te_bench.kernels.attention.sdpa import repeat_heads
from te_bench.training.step import TrainStep, autocast
from te_bench.training.undisturbed import gradients_apart

NAMES = ("out", "dq", "dk", "dv")
NEAR = 4  # rows before and after

Attend = Callable[..., Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class Call:
    """One call of attention: q, k, v, dO and out, dq, dk, dv of its first and last sequence, (2, H, T, D)."""

    given: dict[str, Tensor] = field(default_factory=dict)
    found: dict[str, Tensor] = field(default_factory=dict)


def check(step: TrainStep, tokens: Tensor, targets: Tensor, name: str, precision: str) -> list[Quantity]:
    """Of every layer's attention out, dq, dk and dv: scale and worst row, the worst of all layers each.

    name: the backend, whose yardstick is manual attention, and the same as fused kernels round it. precision: what it
    computes in. A layer whose attention was not called is an error. The step's gradients stay as they are.
    """
    calls: list[Call] = []
    with gradients_apart(step.model), _recorded(step.model, calls):
        with step.region():
            loss = step.model(tokens, targets)
        step.scaler.scale(loss).backward()
    layers = len(step.model.attentions())  # type: ignore[operator]
    worst: dict[str, Quantity] = {}
    for layer, call in enumerate(calls):
        with autocast(step.device, step.precision):
            for q in _quantities(f"layer {layer}: attention", call, attention.yardstick(name), precision):
                kind = q.name.partition(": ")[2]
                if kind not in worst or _share(q) > _share(worst[kind]):
                    worst[kind] = q
    return [Quantity("attention, layers that did not call it", float(layers - len(calls)), 0.0), *worst.values()]


def _share(q: Quantity) -> float:
    """Of its limit; what is not a number is worse than any."""
    share = q.error / q.limit
    return math.inf if math.isnan(share) else share


@contextlib.contextmanager
def _recorded(model: Any, calls: list[Call]) -> Iterator[None]:
    """Note each call of attention, of one block after the other or of fused ones."""
    holders = model.attentions()
    usual = [holder.attention for holder in holders]
    for holder, attend in zip(holders, usual, strict=True):
        holder.attention = functools.partial(_record, attend, calls)
    try:
        yield
    finally:
        for holder, attend in zip(holders, usual, strict=True):
            holder.attention = attend


def _record(attend: Attend, calls: list[Call], q: Tensor, k: Tensor, v: Tensor, **said: Any) -> Tensor:
    if torch._C._current_graph_task_id() != -1:  # computed again in a backward pass, for a call recorded before
        return attend(q, k, v, **said)
    call = Call()
    calls.append(call)
    out = attend(q, k, v, **said)
    call.found["out"] = _ends(out)
    for name, x in (("q", q), ("k", k), ("v", v)):
        call.given[name] = _ends(x)
        x.register_hook(functools.partial(_keep, call.found, f"d{name}"))
    out.register_hook(functools.partial(_keep, call.given, "dout"))
    return out


def _ends(x: Tensor) -> Tensor:
    return x.detach()[:: max(1, len(x) - 1)].clone()


def _keep(into: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    into[name] = _ends(gradient)


def _quantities(where: str, call: Call, definition: str, precision: str) -> list[Quantity]:
    q, k, v, dout = (call.given[name] for name in ("q", "k", "v", "dout"))
    manual = attention.load("manual").forward
    truth = _by(manual, *(x.double() for x in (q, k, v, dout)))
    yardsticks = [_by(attention.load(definition).forward, q, k, v, dout)]
    if definition == "manual":
        yardsticks.append(_by(as_fused, q, k, v, dout))
    found = []
    for i, name in enumerate(NAMES):
        x, exact, known = call.found[name], truth[i], [yardstick[i] for yardstick in yardsticks]
        scale, _ = rounding.quantities(f"{where}'s {name}", x, exact, known[-1], precision)
        found += [scale, Quantity(f"{where}'s {name}, worst row", _worst_row(x, exact, known), 1.0)]
    return found


def _by(attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Four:
    """out, dq, dk, dv, with the causal mask and the usual scale, 1 / sqrt(D)."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    if q.shape[1] * q.shape[2] ** 2 > large.LARGE:
        attend = large.by_heads(attend)
    with contextlib.nullcontext() if q.dtype is not torch.float64 else torch.autocast(q.device.type, enabled=False):
        out = attend(q, k, v, causal=True, scale=1 / math.sqrt(q.shape[3]))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))
    return out.detach(), dq, dk, dv


class _Fused(torch.autograd.Function):
    """Attention in float32 but for what fused kernels round to the inputs' dtype: P, dS, and out, which makes delta.

    Where all of a row's weight is on one key its dS is nothing but the rounding of out.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out = (_weights(q, k, bias, scale).to(q.dtype).float() @ _shared(q, v)).to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, bias, out = ctx.saved_tensors
        dtype, scale = q.dtype, ctx.scale
        with torch.autocast(q.device.type, enabled=False):
            weights, dout = _weights(q, k, bias, scale), dout.float()
            delta = (out.float() * dout).sum(-1, keepdim=True)
            dscores = (weights * (dout @ _shared(q, v).mT - delta)).to(dtype).float()
            dq, dk = scale * dscores @ _shared(q, k), scale * dscores.mT @ q.float()
            dv = weights.to(dtype).float().mT @ dout
            # Heads that share a key add up before they are rounded.
            dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None, None


def _shared(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values in float32, for each head of q."""
    return repeat_heads(x, q.shape[1]).float()


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = q.float() @ _shared(q, k).mT * scale
    return (scores if bias is None else scores + bias).softmax(-1)


def as_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """The definition of attention, rounded as fused kernels round it: the yardstick of all that keep no scores.

    bias, which gets no gradient, is added to the scores.
    """
    assert not dropout
    if causal:
        assert bias is None
        bias = torch.full((q.shape[2], k.shape[2]), -math.inf, device=q.device).triu(1)
    out: Tensor = _Fused.apply(q, k, v, bias, scale)
    return out


def _worst_row(x: Tensor, truth: Tensor, yardsticks: list[Tensor]) -> float:
    """Over rows (sequence, head, t): the error's norm over ATTENTION_ROWS times the yardsticks' own, or their mean NEAR t.

    Of the first rows' dq next to nothing is there but rounding, some heads' a tenth of others': few rows are no measure.
    """
    noise = torch.stack([torch.linalg.vector_norm(y.double() - truth, dim=3) for y in yardsticks]).amax(0)
    usual = noise.square().mean((0, 1))[None]
    noise = noise.maximum(F.avg_pool1d(usual, 2 * NEAR + 1, 1, NEAR, count_include_pad=False).sqrt())
    limit = ATTENTION_ROWS * noise + ACCUMULATED * torch.linalg.vector_norm(truth, dim=3).max()
    error = torch.linalg.vector_norm(x.double() - truth, dim=3)
    return (error / limit.clamp(min=1e-300)).max().item()
