"""References of long sequences and large vocabularies: the same arithmetic a part at a time, and no part is kept.

Written out in float64, 8,192 tokens of Llama 3.2 1B have 16 GiB of scores in each of 16 layers, and logits of 8 GiB. So
attention goes by the heads that share a key, the loss by rows, and each of them, as each block, is computed again in the
backward pass. No rounding changes: heads, rows of logits and blocks are computed as ever; sums over rows are float32's or
wider.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from te_bench.kernels import linear_cross_entropy
from te_bench.models.checkpointing import blocks_of
from te_bench.models.configs import Shape
from te_bench.models.decoder import Decoder

#: Of one sequence the scores of a layer, or the logits, that the references do not hold at once: 1 GiB in float64.
LARGE = 2**27

Attend = Callable[..., Tensor]

_again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # nothing here is random


def is_large(shape: Shape, tokens: int) -> bool:
    """Whether a sequence of so many tokens goes by parts. GPT-2 XL's 1,024 have a fifth of LARGE."""
    return max(shape.heads * tokens, shape.vocab) * tokens > LARGE


def by_parts(model: Decoder) -> None:
    """Let the model compute by parts; its head must be none, which makes all logits at once."""
    assert model.heads is None
    for module in model.attentions():
        module.attention = by_heads(module.attention)
    for block in blocks_of(model):
        block.forward = functools.partial(_again, block.forward)
    head = linear_cross_entropy.Backend(forward=functools.partial(_loss, model))
    model.heads = dict.fromkeys((True, False), head)


def by_heads(attend: Attend, axis: int = 1) -> Attend:
    """attend(q, k, v, ...) of the heads that share a key at a time; axis: which dimension they are, of the result too."""

    def attended(q: Tensor, k: Tensor, v: Tensor, **said: Any) -> Tensor:
        groups = k.shape[axis]
        shared = zip(q.chunk(groups, axis), k.chunk(groups, axis), v.chunk(groups, axis), strict=True)
        return torch.cat([_again(attend, *each, **said) for each in shared], axis)

    return attended


class ByParts(TorchFunctionMode):
    """scaled_dot_product_attention and cross_entropy of any module by parts, where they are LARGE.

    found: whether any call was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self.others: tuple[TorchFunctionMode, ...] = ()

    @contextlib.contextmanager
    def beside(self, *others: TorchFunctionMode) -> Iterator[None]:
        """Inside the other modes."""
        self.others = others
        with contextlib.ExitStack() as modes:
            for mode in (*others, self):
                modes.enter_context(mode)
            yield

    def recompute_blocks(self, model: nn.Module) -> None:
        """Let each block compute again in the backward pass what it would keep for it."""
        for block in blocks_of(model):
            block.forward = functools.partial(_again, self._under(block.forward, self))

    def _under(self, function: Callable[..., Any], *more: TorchFunctionMode) -> Callable[..., Any]:
        """The function under the modes: no mode is there in a backward pass, which computes it again."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as modes:
                for mode in (*self.others, *more):
                    modes.enter_context(mode)
                return function(*args, **kwargs)

        return called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.cross_entropy:
            return self._loss(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        attend = functools.partial(
            F.scaled_dot_product_attention,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        is_large = query.dim() == 4 and query.shape[1] * query.shape[2] * key.shape[2] > LARGE
        self.found |= is_large
        of_each_head = attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] != 1
        if is_large and not of_each_head and key.shape[1] > 1:
            return by_heads(self._under(attend))(query, key, value)
        return attend(query, key, value)

    def _loss(self, input: Tensor, target: Tensor, *more: Any, **said: Any) -> Tensor:
        reduction, ignored = said.get("reduction", "mean"), said.get("ignore_index", -100)
        plain = input.dim() == 2 and target.dim() == 1 and not more and said.keys() <= {"reduction", "ignore_index"}
        if not plain or reduction == "none" or input.numel() <= LARGE:
            return F.cross_entropy(input, target, *more, **said)
        self.found = True
        rows = max(1, LARGE // input.shape[1])
        loss = self._under(functools.partial(F.cross_entropy, ignore_index=ignored, reduction="sum"))
        parts = zip(input.split(rows), target.split(rows), strict=True)
        total = torch.stack([_again(loss, *part) for part in parts]).sum()
        return total / (target != ignored).sum() if reduction == "mean" else total


def _loss(model: Decoder, x: Tensor, weight: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
    """Mean cross-entropy of x (N, C) through the model's head, whatever that computes in, a few rows at a time."""
    assert vocab == len(weight), "references have no padding"
    rows = max(1, LARGE // vocab)
    parts = zip(x.split(rows), targets.split(rows), strict=True)
    total = torch.stack([_again(_summed, model.tables().head, *part) for part in parts]).sum()
    return total / (targets != linear_cross_entropy.IGNORED).sum()


def _summed(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    device = x.device.type
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    with torch.autocast(device, dtype, enabled, cache_enabled=False):  # one copy's gradient would add up in bf16
        logits = head(x)
    loss = F.cross_entropy(logits, targets, ignore_index=linear_cross_entropy.IGNORED, reduction="sum")
    return loss.to(torch.promote_types(loss.dtype, torch.float32))
