"""A large model's FP8 weights last in one layout, and what qkv and proj read is cast again: the same bits, fewer bytes."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept_bytes import kept
from large_models import RECIPE, Limit, assert_equal, layouts, trained
from module_cases import randomise
from table_adamw_cases import OPTIM, SMALL
from torch import Tensor

import te_bench.models as te
from te_bench.models import cost
from te_bench.models.configs import CONFIGS, LlamaConfig
from te_bench.models.decoder import build
from te_bench.training.step import TrainStep

BATCH, LENGTH, VOCAB = 2, 16, 60
LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
    head_dim=8, block_size=LENGTH, vocab_size=VOCAB, tie_word_embeddings=True,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("plain_heads")


def of_the_zoo(config: Any = LLAMA, accumulate: int = 1, **options: Any) -> TrainStep:
    torch.manual_seed(0)
    how: dict[str, Any] = {"recipe": RECIPE, "head": "fp8", "blocks": "fused", "padded_vocab_size": 64}
    model = build(config, attention="manual", **how)
    how = {"mode": "eager", "optimizer": "reference"} | options
    return TrainStep(model, dataclasses.replace(OPTIM, accumulate=accumulate), precision="fp8", **how)


STEPS: dict[str, Callable[[], TrainStep]] = {
    "llama of the zoo": of_the_zoo,
    "its own head": lambda: of_the_zoo(dataclasses.replace(LLAMA, tie_word_embeddings=False)),
    "gpt": lambda: of_the_zoo(dataclasses.replace(SMALL, bias=True)),
    "micro-batches": lambda: of_the_zoo(accumulate=2),
    "torch's optimizer": lambda: of_the_zoo(optimizer=None),
}


@pytest.mark.parametrize("name", STEPS)
def test_it_trains_bit_for_bit_as_with_both_layouts(name: str, limit: Limit) -> None:
    wanted = trained(STEPS[name]())
    limit(0)
    step = STEPS[name]()
    assert step.table is None or layouts(step) == {False}
    assert_equal(trained(step), wanted)


def test_a_layer_of_te(limit: Limit) -> None:
    def passes() -> list[Tensor]:
        torch.manual_seed(0)
        options: dict[str, Any] = {"normalization": "LayerNorm", "params_dtype": torch.bfloat16, "device": "cpu"}
        layer = te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, **options)
        randomise(layer)
        found = []
        for number in range(4):
            x = torch.randn(8, 2, 32, dtype=torch.bfloat16, requires_grad=True)
            with te.autocast(recipe=RECIPE):
                y = layer(x, is_first_microbatch=number % 2 == 0)
            found += [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))]
        return found

    wanted = passes()
    limit(0)
    assert_equal(passes(), wanted)


def test_compiled_steps_and_small_models_keep_both_layouts(limit: Limit) -> None:
    step = of_the_zoo()
    elements = sum(copy.fp8.kept.data.numel() for copy in step.table.copies.values() if copy.fp8)  # type: ignore[union-attr]
    assert elements == LLAMA.shape.weights * LLAMA.shape.layers
    for least, both in ((elements, False), (elements + 1, True)):
        limit(least)
        assert layouts(of_the_zoo()) == {both}
        assert layouts(of_the_zoo(mode="compile")) == {True}


def test_which_models_are_large() -> None:
    """Those of which a second layout takes half a GiB: from GPT-2 large on."""
    large = {name for name, config in CONFIGS.items() if config.shape.weights * config.shape.layers >= cost.ONCE}
    assert {"gpt2-large", "llama3-1b"} < large
    assert not large & {"gpt2", "gpt2-medium"}


# Bytes held


def test_what_a_layer_keeps(limit: Limit) -> None:
    """Of what its Linears read up's input alone, in FP8, and their weights nowhere a second time."""
    batch = torch.randint(0, VOCAB, (BATCH, LENGTH))
    both = Counter(kept(of_the_zoo(), batch))
    limit(0)
    found = Counter(kept(of_the_zoo(), batch))
    assert found < both
    assert both - found == Counter({(torch.float8_e4m3fn, BATCH * LENGTH * LLAMA.hidden_size): 2 * 2})


@pytest.mark.parametrize("large", [False, True])
def test_it_is_what_cost_counts(large: bool, limit: Limit) -> None:
    limit(0 if large else 2**60)
    step = of_the_zoo()
    table = step.table
    assert table is not None
    every = cost.memory(LLAMA, batch=BATCH, padded_vocab=64, fp8=True, fp8_head=True, logits=1)
    counted = {held.what: held.bytes for held in every}
    copies = [t for c in table.copies.values() if c.fp8 for t in (c.fp8.kept.data, c.fp8.kept.data_t) if t is not None]
    copies += [c.leaf for c in table.copies.values() if c.half]
    assert counted["weights for GEMMs"] == sum(t.nbytes for t in copies)
    found = kept(step, torch.randint(0, VOCAB, (BATCH, LENGTH)))
    blocks = ("residual stream", "attention", "the activation's input", "operands of weight gradients")
    assert sum(size for _, size in found) == sum(counted[name] for name in blocks)


@pytest.mark.parametrize(("name", "gib"), [("llama3-1b", 24), ("llama3-3b", 58)])
def test_llamas_under_their_bars(name: str, gib: int, limit: Limit) -> None:
    """1 x 8192 tokens, float32 weights: 27.8 and 66.7 GiB with both layouts and a bf16 copy."""
    limit(0)
    config = dataclasses.replace(CONFIGS[name], block_size=8192)
    every = cost.memory(config, batch=1, padded_vocab=128256, fp8=True, fp8_head=True, logits=0, strip=0, chunk=8192)
    held = {part.what: part.bytes for part in every}
    # dW takes the place of the head's FP8 operands but for those of the hidden states.
    table = 128256 * config.shape.hidden
    assert sum(held.values()) - 2 * table + 4 * table < gib * 2**30
