"""Transformer Engine's layers in the model, by a stand-in in plain PyTorch: the same loss and gradients by name."""

import contextlib
import copy
import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from passes import BIASED, NORMED, TINY, a_model, a_pass, errors
from torch import Tensor, nn

from te_bench.models import rivals
from te_bench.models.configs import CONFIGS, LlamaConfig
from te_bench.models.peers import transformer_engine
from te_bench.training.evaluation import evaluate
from te_bench.training.step import Optim, TrainStep

RECIPES = {
    "transformer_engine_delayed": "DelayedScaling",
    "transformer_engine_current": "Float8CurrentScaling",
    "transformer_engine_block": "Float8BlockScaling",
}
NAME = "transformer_engine_delayed"
EPS = dataclasses.replace(NORMED, rms_norm_eps=1e-2)  # not TransformerLayer's own


class Holder(nn.Module):
    """Parameters by their names and shapes, and an eps."""

    def __init__(self, device: str, eps: float = 0.0, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.eps = eps
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device)))


class RMSNorm(Holder):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, *, device: str = "cuda") -> None:
        super().__init__(device, eps, weight=(normalized_shape,))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class SelfAttention(nn.Module):
    """As TE's MultiheadAttention reads one weight for q, k and v: (b, s, 3 c) by groups last, or, interleaved, first."""

    def __init__(
        self, c: int, heads: int, groups: int, d: int, eps: float, interleaved: bool, qk_eps: float | None
    ) -> None:
        super().__init__()
        self.shape = (groups, heads // groups + 2, d) if interleaved else (heads // groups + 2, groups, d)
        self.split_dim, self.sizes = (-2 if interleaved else -3), [heads // groups, 1, 1]
        width = (heads + 2 * groups) * d
        self.layernorm_qkv = Holder("meta", eps, layer_norm_weight=(c,), weight=(width, c))
        self.proj = Holder("meta", weight=(c, heads * d))
        self.q_norm, self.k_norm = (None if qk_eps is None else RMSNorm(d, qk_eps, device="meta") for _ in "qk")

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        first = self.layernorm_qkv
        mixed = F.linear(F.rms_norm(x, x.shape[-1:], first.layer_norm_weight, first.eps), first.weight)
        split = mixed.unflatten(-1, self.shape).split(self.sizes, self.split_dim)
        q, k, v = (t.reshape(*x.shape[:2], -1, self.shape[-1]) for t in split)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (rope(q, freqs), rope(k, freqs), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(2), self.proj.weight)


def rope(x: Tensor, freqs: Tensor) -> Tensor:
    """(b, s, h, d) and (s, 1, 1, d): halves turn."""
    assert freqs.shape == (x.shape[1], 1, 1, x.shape[-1])
    turns, (first, second) = freqs.transpose(0, 1), x.chunk(2, -1)
    return (x * turns.cos() + torch.cat((-second, first), -1) * turns.sin()).to(x.dtype)


class TransformerLayer(nn.Module):
    """TE's, with its defaults, as far as a Llama needs it."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        fuse_qkv_params: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: str = "cuda",
        attn_input_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
    ) -> None:
        super().__init__()
        assert (hidden_dropout, attention_dropout, bias, fuse_qkv_params) == (0, 0, False, True)
        assert (self_attn_mask_type, attn_input_format) == ("causal", "bshd")
        assert (normalization, activation, device) == ("RMSNorm", "swiglu", "meta")
        assert (qk_norm_type, qk_norm_before_rope) in ((None, False), ("RMSNorm", True))
        c, eps, groups = hidden_size, layernorm_epsilon, num_gqa_groups or num_attention_heads
        shape = (num_attention_heads, groups, kv_channels or c // num_attention_heads)
        qk_eps = None if qk_norm_type is None else qk_norm_eps
        self.self_attention = SelfAttention(c, *shape, eps, qkv_weight_interleaved, qk_eps)
        shapes = {"layer_norm_weight": (c,), "fc1_weight": (2 * ffn_hidden_size, c), "fc2_weight": (c, ffn_hidden_size)}
        self.layernorm_mlp = Holder(device, eps, **shapes)

    def forward(self, x: Tensor, *, rotary_pos_emb: Tensor) -> Tensor:
        x = x + self.self_attention(x, rotary_pos_emb)
        mlp = self.layernorm_mlp
        y = F.linear(F.rms_norm(x, x.shape[-1:], mlp.layer_norm_weight, mlp.eps), mlp.fc1_weight)
        gate, up = y.chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, mlp.fc2_weight)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str]]:
    """A stand-in of transformer_engine as far as it is called; (enabled, the recipe's name) of the autocasts entered."""
    entered: list[tuple[bool, str]] = []

    def autocast(enabled: bool = True, *, recipe: Any) -> contextlib.AbstractContextManager[None]:
        entered.append((enabled, type(recipe).__name__))
        return contextlib.nullcontext()

    modules: dict[str, Any] = {
        name: types.ModuleType(f"transformer_engine{name}") for name in ("", ".common", ".common.recipe", ".pytorch")
    }
    for name in RECIPES.values():
        setattr(modules[".common.recipe"], name, type(name, (), {}))
    modules[".common"].recipe = modules[".common.recipe"]
    for kind in (TransformerLayer, RMSNorm, autocast):
        setattr(modules[".pytorch"], kind.__name__, kind)
    for module in modules.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return entered


@pytest.mark.parametrize("config", [TINY, EPS])
def test_loss_and_gradients_are_the_model_s(config: LlamaConfig, package: list[tuple[bool, str]]) -> None:
    options: dict[str, Any] = {"attention": "manual", "padded_vocab_size": 320}
    theirs, found = a_pass(a_model(config, NAME, **options))
    ours, wanted = a_pass(a_model(config, None, **options))
    assert theirs == pytest.approx(ours, rel=1e-6)
    assert max(errors(found, wanted).values()) < 1e-5
    assert package == [(True, "DelayedScaling")]


@pytest.mark.parametrize("name", RECIPES)
def test_it_trains_under_its_recipe_and_evaluates_without(name: str, package: list[tuple[bool, str]]) -> None:
    model = a_model(TINY, name, attention="manual")
    trained, _ = a_pass(model)
    tokens, targets = torch.randint(0, 256, (2, 2, 32), generator=torch.Generator().manual_seed(2))
    evaluated = evaluate(model, iter([(tokens, targets)]), "fp32", quantized=False)
    assert package == [(True, RECIPES[name]), (False, RECIPES[name])]
    assert evaluated == pytest.approx(trained, rel=1e-6)


def test_it_computes_with_the_weights_that_the_model_has_then(package: list[tuple[bool, str]]) -> None:
    """Others in place of those of the pass before; those of a copy are its own."""
    theirs, ours = (a_model(NORMED, name, attention="manual") for name in (NAME, None))
    before, _ = a_pass(theirs)
    twin = copy.deepcopy(theirs)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    others = {name: 2 * weight for name, weight in ours.state_dict().items()}
    for model in (theirs, ours):
        model.load_state_dict(others, assign=True)
    (loss, found), (expected, wanted) = a_pass(theirs), a_pass(ours)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert max(errors(found, wanted).values()) < 1e-5
    after, _ = a_pass(twin)
    assert before == after != loss


@pytest.mark.parametrize("optimizer", [None, "reference"])  # the latter leaves copies of the weights in the model
def test_a_step_of_it_trains_as_ours_does(optimizer: str | None, package: list[tuple[bool, str]]) -> None:
    tokens, targets = torch.randint(0, 256, (2, 2, 32), generator=torch.Generator().manual_seed(2))
    losses = {}
    for name in (NAME, None):
        how: dict[str, Any] = {"precision": "bf16", "mode": "eager", "optimizer": optimizer}
        step = TrainStep(a_model(TINY, name, attention="manual"), Optim(learning_rate=1e-2), **how)
        losses[name] = [step(tokens, targets).item() for _ in range(4)]
    assert losses[NAME] == sorted(losses[NAME], reverse=True)
    assert losses[NAME] == pytest.approx(losses[None], rel=1e-2)


def test_where_it_cannot_run_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = rivals.load(NAME).unsupported
    with monkeypatch.context() as there:
        there.setattr(transformer_engine, "missing", lambda *_: None)
        assert all(unsupported(config, "cuda", (8, 9)) is None for config in (TINY, NORMED))
        assert unsupported(TINY, "cpu", None) == "needs an NVIDIA GPU: Transformer Engine does not run on a CPU"
        assert unsupported(TINY, "cuda", (8, 6)) == "needs an NVIDIA GPU of compute capability 8.9 or newer"
        assert unsupported(BIASED, "cuda", (9, 0)) == "some of its Linears have biases"
        assert unsupported(CONFIGS["tiny"], "cuda", (9, 0)) == "its norms are no plain RMSNorm"
        block = rivals.load("transformer_engine_block").unsupported
        assert block(TINY, "cuda", (8, 9)) == "needs an NVIDIA GPU of compute capability 9.0 or newer"
    with monkeypatch.context() as missing:
        missing.setattr("importlib.util.find_spec", lambda package: None)
        reason = "needs transformer_engine: pip install --no-build-isolation 'transformer_engine[pytorch]'"
        assert unsupported(TINY, "cuda", (9, 0)) == reason
