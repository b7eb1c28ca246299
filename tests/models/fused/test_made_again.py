"""A gated activation is not kept but made again in the backward pass, bit for bit; and what a decoder's layer keeps."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from kept_bytes import kept
from module_cases import RECIPES, randomise
from table_adamw_cases import DELAYED, OPTIM
from torch import Tensor

import te_bench.models as te
from te_bench.kernels.activation import KINDS
from te_bench.models import recipe as recipes
from te_bench.models.configs import LlamaConfig
from te_bench.models.decoder import build
from te_bench.models.fused import chain, segment
from te_bench.training.data import Batches
from te_bench.training.step import TrainStep

BATCH, LENGTH, VOCAB = 2, 32, 60
#: Llama-3-8B's layer at a 64th: 4 queries to a key, F = 3.5 C.
LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=224, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
    head_dim=16, block_size=LENGTH, vocab_size=VOCAB,
)  # fmt: skip
GATED = [kind for kind, (_, gated) in KINDS.items() if gated]

pytestmark = pytest.mark.usefixtures("plain_heads")


def a_step(recipe: str | None) -> TrainStep:
    torch.manual_seed(0)
    found = recipes.load(recipe) if recipe else None
    model = build(LLAMA, attention="manual", padded_vocab_size=64, recipe=found, head="chunked", blocks="fused")
    return TrainStep(model, OPTIM, precision="fp8" if recipe else "bf16", mode="eager", optimizer="reference")


def gradients(recipe: str | None) -> list[dict[str, Tensor]]:
    """Of four steps, in which delayed scaling's scales change between the passes."""
    step, batches = a_step(recipe), Batches(None, block=LENGTH, batch=BATCH, vocab=VOCAB, seed=7)
    return [step.gradients(*batches.at(number), records=True)[1] for number in range(4)]


def keep_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = segment.MLP
    monkeypatch.setattr(chain, "_scales", lambda parts, training: itertools.repeat(None))
    monkeypatch.setattr(segment, "MLP", lambda *parts: mlp(*parts)._replace(again=False))


@pytest.mark.parametrize("recipe", [None, DELAYED])
def test_a_llamas_gradients_are_those_of_an_activation_that_is_kept(recipe, monkeypatch):
    found = gradients(recipe)
    keep_activations(monkeypatch)
    for mine, wanted in zip(found, gradients(recipe), strict=True):
        assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert all(wanted.any() for wanted in found[-1].values())


@pytest.mark.parametrize("kind", GATED)
def test_a_layers_gradients_are_those_of_an_activation_that_is_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def passes() -> list[Tensor]:
        torch.manual_seed(0)
        options: dict[str, Any] = {"normalization": "RMSNorm", "activation": kind, "params_dtype": torch.bfloat16}
        layer = te.TransformerLayer(64, 96, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu", **options)
        randomise(layer)
        found = []
        for _ in range(3):
            x = torch.randn(16, 2, 64, dtype=torch.bfloat16, requires_grad=True)
            with te.autocast(recipe=RECIPES["delayed"][0]):
                y = layer(x)
            found += [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))]
        return found

    found = passes()
    keep_activations(monkeypatch)
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, passes(), strict=True))


# Bytes held


@pytest.mark.parametrize("recipe", [None, DELAYED])
def test_what_a_llamas_layers_keep(recipe: str | None) -> None:
    """Of Llama-3-8B at 8192 tokens it is 0.91 GiB in bf16 and 0.88 in FP8: the activation, 2 F or F bytes, is not in it."""
    c, f, heads = LLAMA.hidden_size, LLAMA.intermediate_size, LLAMA.num_attention_heads
    layer = Counter(
        {
            (torch.float32, 4 * c): 1,  # the stream after the layer
            # What attention made, and what its projection added to the stream; in bf16 what qkv and up read.
            (torch.bfloat16, 2 * c): 2 if recipe else 4,
            (torch.bfloat16, 2 * LLAMA.shape.qkv): 1,
            (torch.float32, 4 * heads): 1,  # a logarithm for each row and head
            (torch.bfloat16, 2 * 2 * f): 1,  # gate and up
            (torch.float32, 4): 2,  # the norms' rstd
            (torch.float8_e4m3fn, c): 3 if recipe else 0,  # what qkv, proj and up read, transposed
        }
    )
    once = Counter({(torch.float32, 4 * c): 1, (torch.float32, 4): 1})  # embedded tokens, the last norm
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH))
    found = kept(a_step(recipe), tokens)
    assert Counter((dtype, size / tokens.numel()) for dtype, size in found) == layer + layer + once
