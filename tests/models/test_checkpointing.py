"""Gradient checkpointing of any model's blocks: the same gradients, fewer kept tensors."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import decoder, recipe
from te_bench.models.checkpointing import blocks_of, checkpoint_blocks, expression

TOKENS = torch.randint(96, (2, 32), generator=torch.Generator().manual_seed(0))


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=dropout, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(96, 64), nn.TransformerEncoder(layer, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.embedding(tokens))
        return out.square().mean()


def gradients(model: nn.Module, *inputs: Tensor) -> tuple[dict[str, Tensor], int]:
    """Of a pass, and the elements that it kept for its backward pass."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.numel()
        return x

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(*inputs)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(kept.values())


def assert_the_same(model: nn.Module, twin: nn.Module, *inputs: Tensor, fewer: float) -> None:
    found, kept = gradients(model, *inputs)
    wanted, all_of_them = gradients(twin, *inputs)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0, msg=name)
    assert kept < fewer * all_of_them


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_an_encoders_gradients_are_the_same_and_less_is_kept(dropout: float) -> None:
    model = Encoder(dropout)
    twin = copy.deepcopy(model)
    names = list(model.state_dict())
    assert checkpoint_blocks(model) == 3
    assert list(model.state_dict()) == names
    assert_the_same(model, twin, TOKENS, fewer=0.5)


class Hidden(nn.Module):
    """Blocks whose rate of dropout no module keeps."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(F.gelu(self.inner(x)), 0.5, self.training)

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(96, 64), nn.Sequential(*(self.Block() for _ in range(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.embedding(tokens))
        return out.square().mean()


class Staged(Hidden):
    """Blocks in lists of lists, of which none is called."""

    def __init__(self) -> None:
        super().__init__()
        self.stages, self.blocks = nn.ModuleList(nn.ModuleList([block]) for block in self.blocks), nn.Sequential()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]
                x = block(x)
        out: Tensor = x.square().mean()
        return out


@pytest.mark.parametrize("kind", [Hidden, Staged])
def test_dropout_that_no_module_keeps_is_drawn_again_in_blocks_in_lists_too(kind: type[Hidden]) -> None:
    model = kind()
    twin = copy.deepcopy(model)
    assert checkpoint_blocks(model) == 3
    assert_the_same(model, twin, TOKENS, fewer=0.9)


def test_a_model_that_is_a_list_itself_has_its_blocks_there() -> None:
    model = nn.Sequential(nn.Embedding(96, 64), Hidden.Block(), nn.GELU(), Hidden.Block())
    assert blocks_of(model) == [model[1], model[3]]


def test_a_copy_computes_with_its_own_weights() -> None:
    model = Encoder()
    checkpoint_blocks(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert model(TOKENS) == 0
    assert twin(TOKENS) > 0


def test_a_decoder_of_te_bench() -> None:
    model = decoder.load("tiny")
    twin = copy.deepcopy(model)
    assert checkpoint_blocks(model) == len(blocks_of(twin)) > 1
    assert_the_same(model, twin, TOKENS, TOKENS.roll(-1), fewer=0.8)


@pytest.mark.parametrize("chosen", [recipe.DelayedScaling(), recipe.Float8CurrentScaling()])
def test_in_fp8_an_amax_counts_once(chosen: recipe.Recipe) -> None:
    torch.manual_seed(0)
    model: Any = Encoder()
    te.convert(model, chosen)
    twin = copy.deepcopy(model)
    checkpoint_blocks(model)
    x, numerics = TOKENS.repeat(4, 1), []
    for one in (model, twin):
        for _ in range(3):
            one.zero_grad()
            with te.autocast(recipe=chosen):
                loss = one(x)
            loss.backward()
        numerics.append(te.numerics(one))
    for (name, found), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=0, atol=0, msg=name)
    assert numerics[0] == numerics[1]


@pytest.mark.parametrize(
    ("model", "said", "number"),
    [
        (Hidden(), "model.blocks", 3),
        (Staged(), "(*model.stages[0], *model.stages[1], *model.stages[2])", 3),
        (nn.ModuleDict({"h": nn.ModuleList([Hidden.Block()])}), "model.h", 1),
        (
            nn.ModuleDict({key: nn.ModuleList([Hidden.Block()]) for key in ("0", "a-b")}),
            "(*model['0'], *model['a-b'])",
            2,
        ),
        (nn.Sequential(OrderedDict({"a-b": nn.ModuleList([Hidden.Block()])})), "model.get_submodule('a-b')", 1),
        (nn.ModuleList([nn.ModuleList([Hidden.Block()])]), "model[0]", 1),
        (
            nn.ModuleDict({"net": nn.Sequential(nn.Embedding(96, 64), Hidden.Block(), nn.LayerNorm(64))}),
            "[block for block in model.net if any(block.children())]",
            1,
        ),
        (nn.Linear(2, 2), "", 0),
    ],
)
def test_blocks_are_said_as_python_finds_them(model: nn.Module, said: str, number: int) -> None:
    assert expression(model) == said
    found = eval(said, {"model": model}) if said else ()
    assert list(found) == blocks_of(model)
    assert len(blocks_of(model)) == number


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no"):
        checkpoint_blocks(nn.Linear(2, 2))


def transformers_model(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if family == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4}
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, **sizes, **rates))
        return model
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, **sizes))
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_transformers_model_as_its_users_call_it(family: str) -> None:
    """By default it fills a cache of keys and values, which a block that computes again would find full."""
    model: Any = transformers_model(family)
    twin = copy.deepcopy(model)
    assert checkpoint_blocks(model) == 2
    for one in (model, twin):
        loss = F.cross_entropy(one(input_ids=TOKENS).logits.flatten(0, 1), TOKENS.flatten())
        loss.backward()
    for (name, found), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=0, atol=0, msg=name)


def test_a_transformers_model_still_generates_by_its_cache() -> None:
    model: Any = transformers_model("llama").eval()
    with torch.no_grad():
        whole = model(input_ids=TOKENS).logits[:, -1]
        checkpoint_blocks(model)
        before = model(input_ids=TOKENS[:, :-1])
        last = model(input_ids=TOKENS[:, -1:], past_key_values=before.past_key_values).logits[:, -1]
    assert before.past_key_values.get_seq_length() == TOKENS.shape[1]
    torch.testing.assert_close(last, whole)
