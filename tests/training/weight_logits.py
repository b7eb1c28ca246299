"""Logits of a model with 51 classes, and of transformers' that read or wrote its weights; changes to what was written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({k: v.contiguous() for k, v in change(tensors).items()}, folder / "model.safetensors")


def configure(folder: Path, **changes: Any) -> None:
    """Change config.json; ... leaves a setting out."""
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
