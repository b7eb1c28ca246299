"""Vocabulary parallelism: each rank embeds tokens, and computes logits and their gradients, for its own rows only.

No rank ever has all logits of a token. The loss all-reduces each token's largest logit, sum of exponentials and target
logit: 12 bytes a token. With sequence parallelism a rank has a share of the tokens between the layers.
Source: Shoeybi et al., arXiv:1909.08053; Megatron-LM, tensor_parallel/cross_entropy.py.
"""

import functools
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from te_bench.kernels.linear_cross_entropy import IGNORED, Backend
from te_bench.models.decoder import Decoder
from te_bench.models.modules.activations import compute_dtype
from te_bench.models.modules.linear import linear
from te_bench.models.modules.tensor_parallel import Division, Ranks


def compute_by(model: Any, ranks: Ranks, first: int) -> None:
    """Make the model embed and compute its loss with tables of only this rank's rows, beginning at row `first`."""
    model.embed = functools.partial(_embed, model, ranks, first)
    model.logits = _no_logits
    head = Backend(forward=functools.partial(_loss, ranks, first), unsupported=lambda problem: None)
    model.heads = {True: head, False: head}
    if ranks.sequence:
        angles = model.angles
        model.angles = lambda length: angles(length * ranks.size)  # the caller's length is a rank's share of a sequence


def _no_logits(tokens: Tensor) -> Tensor:
    raise ValueError(
        "no rank has all logits where ranks share the vocabulary: save a checkpoint, and load it in one process"
    )


def _embed(model: Decoder, ranks: Ranks, first: int, tokens: Tensor) -> Tensor:
    """Decoder.embed; with sequence parallelism it returns a rank's tokens of the flattened batch as (B, T / ranks, C).

    Norms and residual sums work on any tokens. Raises ValueError if T does not divide.
    """
    tables, (B, T) = model.tables(), tokens.shape
    x = own_rows(model, first, tokens)
    places = torch.arange(T, device=tokens.device)
    if ranks.sequence:
        share = ranks.part("tokens of a sequence", T)
        x = x.reshape(B * ranks.size, share, -1)
        begin = ranks.group.rank() * B * share
        places = torch.arange(begin, begin + B * share, device=tokens.device).remainder(T).view(B, share)
    x = Division(ranks, "row").leave(x)
    return x if tables.positions is None else x + tables.positions(places)


def own_rows(model: Decoder, first: int, tokens: Tensor) -> Tensor:
    """Embed this rank's tokens, with zeros for others': (...) -> (..., C). The sum over the ranks is the embedding."""
    tables, rows = model.tables(), model.config.vocab_size
    torch._assert_async(((tokens >= 0) & (tokens < rows)).all(), f"a token that no row of {rows} embeds")
    own = tokens - first
    last = len(tables.tokens.weight) - 1
    x: Tensor = tables.tokens(own.clamp(0, last)).masked_fill(((own < 0) | (own > last))[..., None], 0)
    return x


def _loss(ranks: Ranks, first: int, x: Tensor, weight: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
    logits = linear(Division(ranks, "column"), x.to(compute_dtype(x)), weight, None)
    return shared_entropy(logits, targets, vocab, first, ranks.group)


def shared_entropy(logits: Tensor, targets: Tensor, vocab: int, first: int, group: Any) -> Tensor:
    """Return the mean cross-entropy in nats over all ranks' logits: (N, columns) from column `first` on -> ().

    It computes in float32 at least. Columns from `vocab` on are padding. Targets are of all tokens; -1 is ignored.
    """
    loss: Tensor = _SharedEntropy.apply(logits, targets, vocab, first, group)
    return loss


class _SharedEntropy(torch.autograd.Function):
    """Cross-entropy that saves the logits as they came, and recomputes their softmax in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab: int, first: int, group: Any) -> Tensor:
        z = without_padding(logits, vocab - first)
        legal = (targets == IGNORED) | ((targets >= 0) & (targets < vocab))
        torch._assert_async(legal.all(), f"a target that is none of {vocab} classes")
        own = targets - first
        here = (own >= 0) & (own < z.shape[1])
        place = own.clamp(0, z.shape[1] - 1)[:, None]
        top = funcol.all_reduce(z.amax(1), "max", group)
        picked = torch.where(here, z.gather(1, place)[:, 0] - top, 0.0)
        total, picked = funcol.all_reduce(torch.stack(((z - top[:, None]).exp().sum(1), picked)), "sum", group)
        kept = targets != IGNORED
        ctx.save_for_backward(logits, top + total.log(), place, here, kept)
        ctx.columns = vocab - first
        return torch.where(kept, total.log() - picked, 0.0).sum() / kept.sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        logits, entropy, place, here, kept = ctx.saved_tensors
        gradient = (without_padding(logits, ctx.columns) - entropy[:, None]).exp()
        gradient = gradient.scatter_add(1, place, -here[:, None].to(gradient.dtype))
        return (gradient * (dy * kept / kept.sum().clamp(min=1))[:, None]).to(logits.dtype), None, None, None, None


def without_padding(logits: Tensor, columns: int) -> Tensor:
    """Return the logits in float32 at least, with -inf from column `columns` on."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if columns >= z.shape[1]:
        return z
    return z.masked_fill(torch.arange(z.shape[1], device=z.device) >= columns, float("-inf"))
