"""What autograd keeps of a decoder's fused blocks from the forward pass to the backward pass."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from te_bench.training.step import TrainStep


class Attention(torch.autograd.Function):
    """It keeps what a flash attention keeps: q, k, v, its output and a float32 a row and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)  # as cuDNN's
        y.copy_((q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)) / 3)
        ctx.save_for_backward(q, k, v, y, q.new_zeros(q.shape[:3], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, k, *_ = ctx.saved_tensors
        of_group = dy.unflatten(1, (k.shape[1], -1)).sum(2)
        return tuple((d / 3).to(k.dtype) for d in (dy, of_group, of_group.clone()))  # type: ignore[return-value]


def kept(step: TrainStep, tokens: Tensor) -> list[tuple[torch.dtype, int]]:
    """Every storage once, without the model's weights and the optimizer's copies of them: its dtype and bytes."""
    model: Any = step.model
    table = step.table
    assert table is not None
    for layer in model.attentions():
        layer.attention = lambda q, k, v, **_: Attention.apply(q, k, v)
    step(tokens, tokens)
    table.prepare()
    copies = [t for c in table.copies.values() for t in (c.leaf, *(c.fp8.kept[:4] if c.fp8 else ())) if t is not None]
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *copies)}
    found: dict[int, tuple[torch.dtype, int]] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if t.dim() and t.is_floating_point() and storage.data_ptr() not in known:
            found[storage.data_ptr()] = t.dtype, storage.nbytes()
        return t

    computing = torch.autocast("cpu", torch.bfloat16), model.autocast(), table.computing()
    with contextlib.ExitStack() as inside:
        for region in (torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), *computing):
            inside.enter_context(region)
        hidden = model.hidden(tokens)
    hidden.sum().backward()
    return list(found.values())
