"""Planning's questions on models that do unusual things in a pass."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_bench.models import adopted, probe, sources

MODULE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

class Normed(Model):  # a batch norm of one number a sequence, as behind the last pool of an image
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x * self.norm(x.mean(1))[:, None])

class Leaf(Model):
    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + torch.zeros_like(x).requires_grad_())

class Casting(Model):  # as the routers of Switch Transformers and NLLB
    def forward(self, tokens):
        y = super().forward(tokens)
        self.head = self.head.to(y.dtype)
        return y + super().forward(tokens)

def layer():
    return nn.Linear(16, 16)

def draw(batch, tokens, generator, device):
    x = torch.randn(batch, tokens, 16, generator=generator, device=device)
    return x, x

def squares(made, targets):
    return (made - targets).square().mean()
"""


@pytest.fixture(autouse=True)
def unusual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "unusual.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("unusual", None)
    adopted.described.cache_clear()


#: {model: FLOP of a token}: of Linear(16, 64) alone, and six of every parameter where the planning pass cannot count.
FLOP = {"Normed": 6 * 16 * 64, "Leaf": 6 * 16 * 64, "Casting": 6 * (2 * 16 * 64 + 64)}


@pytest.mark.parametrize("name", FLOP)
def test_it_can_be_trained_and_its_flop_counted(name: str) -> None:
    source = sources.identify(f"unusual:{name}")
    assert source is not None
    assert probe.find_out(source, 8).parameters >= 64 * 16 + 16 * 64 + 64
    made = adopted.Adopted(adopted.make(source, attention=adopted.OWN, device="cpu"))
    assert made.flop_per_token(8) == FLOP[name]


def test_a_model_that_is_itself_a_layer_has_no_head_that_te_convert_replaces() -> None:
    source = sources.identify("unusual:layer", inputs="unusual:draw", loss="unusual:squares")
    assert source is not None
    assert probe.find_out(source, 8).head == ""
