"""Logits of a model with 51 classes, and of transformers' that read or wrote its weights."""

from typing import Any

import torch
from torch import Tensor

from te_bench.models.decoder import Decoder

VOCAB = 51


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.logits(tokens()) if isinstance(model, Decoder) else model.eval()(tokens()).logits


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.05
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * theirs.abs().max().item())
