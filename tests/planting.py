"""Mutations of a training step that tests of several layers must see."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from te_bench.experiments import timing
from te_bench.training.optimizer import TableAdamW
from te_bench.training.step import TrainStep

Attend = Callable[..., Tensor]


def no_clip_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is measured, and no gradient scaled by it."""
    right = TableAdamW.clip

    def clip(self: TableAdamW, max_norm: float) -> Tensor:
        norm = right(self, max_norm)
        self._multiplier = None
        return norm

    monkeypatch.setattr(TableAdamW, "clip", clip)


# Faults of attention that leave most of it right: attend(q, k, v, *, causal, scale, ...) -> a wrong one.


def _scaled(attend: Attend) -> Attend:
    return lambda q, k, v, *, scale, **said: attend(q, k, v, scale=1.05 * scale, **said)


def _last_row_sees_half(attend: Attend) -> Attend:
    def wrong(q: Tensor, k: Tensor, v: Tensor, **said: Any) -> Tensor:
        half = k.shape[2] // 2
        last = attend(q[:, :, -1:], k[:, :, :half], v[:, :, :half], **{**said, "causal": False})
        return torch.cat([attend(q, k, v, **said)[:, :, :-1], last], dim=2)

    return wrong


def _key_0_lost(attend: Attend) -> Attend:
    """No row but the first, which has no other, sees key 0."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, **said: Any) -> Tensor:
        others = attend(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], **said)
        return torch.cat([attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], **said), others], dim=2)

    return wrong


def _output_a_hundredth_larger(attend: Attend) -> Attend:
    return lambda q, k, v, **said: 1.01 * attend(q, k, v, **said)


def _half_the_gradient_of_key_0(attend: Attend) -> Attend:
    def wrong(q: Tensor, k: Tensor, v: Tensor, **said: Any) -> Tensor:
        first = (k[:, :, :1] + k[:, :, :1].detach()) / 2
        return attend(q, torch.cat([first, k[:, :, 1:]], dim=2), v, **said)

    return wrong


FAULTS_OF_ATTENTION: dict[str, Callable[[Attend], Attend]] = {
    "scale 5 % off": _scaled,
    "the last row sees half its keys": _last_row_sees_half,
    "key 0 is lost": _key_0_lost,
    "its output is 1 % too large": _output_a_hundredth_larger,
    "half of key 0's gradient": _half_the_gradient_of_key_0,
}


def attention_of(step: TrainStep, fault: Callable[[Attend], Attend]) -> None:
    """Plant the fault in every layer's attention, of fused blocks and of others."""
    model: Any = step.model
    for layer in model.attentions():
        layer.attention = fault(layer.attention)


def once(call: Callable[[], object], device: str) -> list[float]:
    """A protocol of `timing`: the seconds of one call."""
    began = time.perf_counter()
    call()
    return [time.perf_counter() - began]


def only_timed(monkeypatch: pytest.MonkeyPatch, protocol: str) -> Callable[[], bool]:
    """Whether a call of that protocol of `timing` is under way: what a fault asks that shows nowhere else."""
    right, under_way = getattr(timing, protocol), [False]

    def timed(call: Callable[[], object], device: str) -> list[float]:
        under_way[0] = True
        try:
            return right(call, device)
        finally:
            under_way[0] = False

    monkeypatch.setattr(timing, protocol, timed)
    return lambda: under_way[0]
