"""Every rival computes the plain layer's function from the plain layer's weights, or says why it can't."""

import contextlib
import dataclasses
import re
import sys
import types
from typing import Any

import pytest
import torch

import te_bench.models as te
from te_bench.models import quickstart as layers
from te_bench.models import recipe as recipes
from te_bench.models.quickstart import LayerConfig, _te, transformer_engine
from te_bench.models.quickstart.plain import PlainLayer

P = LayerConfig(
    hidden=32,
    ffn=48,
    heads=4,
    sequence=10,
    batch=3,
    dropout=0.0,
    mask="causal",
    attention="flash",
    precision="fp32",
    device="cpu",
)
HERE = ("plain", "plain_sdpa", "te_basic", "te_fused", "te_layer")


def changed(**fields: Any) -> LayerConfig:
    return dataclasses.replace(P, **fields)


def results(name: str, p: LayerConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    rival = layers.load(name)
    assert rival.unsupported(p) is None
    module = rival.build(p)
    layers.load_weights(rival, module, weights)
    torch.manual_seed(1)
    x, dy = (torch.rand(p.sequence, p.batch, p.hidden).to(p.dtype) for _ in range(2))
    x.requires_grad_()
    with rival.context(p)():
        y = module(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, **layers.plain_gradients(rival, module, weights)}


def weights_of(p: LayerConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    plain = PlainLayer(p)
    with torch.no_grad():  # torch's norms begin at 1 and 0, which would hide a swapped pair
        for name, weight in plain.named_parameters():
            if name.startswith("ln"):
                weight.copy_(torch.rand_like(weight) + 0.5)
    return {name: weight.detach().to(p.dtype) for name, weight in plain.named_parameters()}


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", HERE)
def test_a_rival_is_the_plain_layer(name: str, mask: str) -> None:
    wide = changed(mask=mask, attention="manual", precision="fp64")
    weights = weights_of(wide)
    truth = results("plain", wide, weights)
    p = changed(mask=mask, attention="manual" if name == "plain" else "flash")
    ours = results(name, p, weights)
    assert ours.keys() == truth.keys()
    for key, value in truth.items():
        assert value is not None
        torch.testing.assert_close(ours[key], value.float(), rtol=1e-4, atol=2e-5, msg=lambda m, key=key: f"{key}: {m}")


def test_te_layer_s_mlp_is_the_plain_one() -> None:
    wide = changed(part="mlp", precision="fp64")
    torch.manual_seed(0)
    weights = {name: torch.rand_like(w) - 0.4 for name, w in layers.load("plain").build(wide).named_parameters()}
    truth = results("plain", wide, weights)
    ours = results("te_layer", changed(part="mlp"), {name: w.float() for name, w in weights.items()})
    assert ours.keys() == truth.keys()
    assert len(truth) == 2 + 6
    for key, value in truth.items():
        assert value is not None
        torch.testing.assert_close(ours[key], value.float(), rtol=1e-4, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


def test_a_parameter_without_a_partner_is_not_left_as_it_was() -> None:
    weights = weights_of(P)
    weights.pop("ln1.bias")
    rival = layers.load("te_layer")
    with pytest.raises(AssertionError, match=r"self_attention\.layernorm_qkv\.layer_norm_bias"):
        layers.load_weights(rival, rival.build(P), weights)


def test_dropout_is_where_the_quickstart_has_it() -> None:
    for name in ("plain", "te_basic", "te_fused"):
        module = layers.load(name).build(changed(dropout=0.25, attention="manual"))
        found = {key: child.p for key, child in module.named_modules() if isinstance(child, torch.nn.Dropout)}
        assert found == {"attention.dropout": 0.25, "dropout": 0.25}
    whole = layers.load("te_layer").build(changed(dropout=0.25))
    assert (whole.hidden_dropout, whole.self_attention.core_attention.attention_dropout) == (0.25, 0.25)


def test_the_context_pins_kernel_and_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    p = changed(precision="fp8", recipe="delayed_scaling", settings={"amax_history_len": 16})
    seen: dict[str, Any] = {}
    monkeypatch.setattr(te, "attention_kernel", lambda name: contextlib.nullcontext(seen.update(kernel=name)))
    monkeypatch.setattr(te, "fp8_autocast", lambda **asked: contextlib.nullcontext(seen.update(asked)))
    with layers.load("te_layer").context(p)():
        pass
    expected = recipes.DelayedScaling(amax_history_len=16, amax_compute_algo="max")
    assert seen == {"kernel": "flash", "enabled": True, "fp8_recipe": expected}
    with layers.load("te_layer").context(P)():
        pass
    assert seen["enabled"] is False


def test_a_setting_that_the_recipe_has_not_is_refused() -> None:
    p = changed(precision="fp8", recipe="rowwise_scaling", settings={"amax_history_len": 16})
    with pytest.raises(ValueError, match=r"rowwise_scaling has no setting 'amax_history_len'\. Its settings: emulate"):
        _te.recipe_of(p)


FP8 = {"precision": "fp8", "recipe": "float8_current_scaling"}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("plain", {}, "attention flash: plain writes attention out"),
        ("plain_sdpa", {"attention": "manual"}, "attention manual: plain_sdpa calls a kernel"),
        ("plain_sdpa", FP8, "nn.Linear has no FP8"),
        ("torchao_tensorwise", {}, "recipe None: this conversion is float8_current_scaling"),
        ("torchao_rowwise", FP8, "recipe float8_current_scaling: this conversion is rowwise_scaling"),
        ("torchao_tensorwise", {**FP8, "settings": {"power_of_two": True}}, "power_of_two: torchao's recipe has no"),
        ("torchao_tensorwise", FP8, "needs torchao: pip install torchao"),
        ("transformer_engine", {}, r"needs transformer_engine: pip install .*transformer_engine\[pytorch\]"),
        ("transformer_engine", {**FP8, "recipe": "rowwise_scaling"}, "Transformer Engine has no rowwise_scaling"),
    ],
)
def test_what_a_rival_cannot_do_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any], reason: str
) -> None:
    rival = layers.load(name)
    with monkeypatch.context() as installed:
        installed.setattr("importlib.util.find_spec", lambda package: None)
        found = rival.unsupported(changed(**changes))
    assert found is not None
    assert re.search(reason, found)


def test_transformer_engine_is_built_as_ours_and_its_recipe_gets_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of the package: the arguments and parameter names are te.TransformerLayer's."""
    pytorch, common = types.ModuleType("transformer_engine.pytorch"), types.ModuleType("transformer_engine.common")
    asked: dict[str, Any] = {}
    monkeypatch.setattr(pytorch, "TransformerLayer", te.TransformerLayer, raising=False)
    monkeypatch.setattr(
        pytorch, "fp8_autocast", lambda **given: contextlib.nullcontext(asked.update(given)), raising=False
    )
    monkeypatch.setattr(common, "recipe", types.SimpleNamespace(DelayedScaling=recipes.DelayedScaling), raising=False)
    for module in (types.ModuleType("transformer_engine"), pytorch, common):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["transformer_engine"], "pytorch", pytorch, raising=False)
    monkeypatch.setattr(pytorch, "LayerNormMLP", te.LayerNormMLP, raising=False)
    alone = transformer_engine.build(changed(part="mlp"))
    mlp = {name for name in transformer_engine.LAYER.names.values() if name.startswith("layernorm_mlp.")}
    assert set(dict(alone.named_parameters())) == mlp
    module = transformer_engine.build(P)
    layers.load_weights(transformer_engine.LAYER, module, weights_of(P))
    p = changed(precision="fp8", recipe="delayed_scaling", settings={"amax_history_len": 16})
    with transformer_engine.context(p)():
        pass
    assert asked == {"enabled": True, "fp8_recipe": recipes.DelayedScaling(amax_history_len=16)}


def test_torchao_converts_by_its_recipe_s_name(torchao: list[str]) -> None:
    for name in ("torchao_tensorwise", "torchao_rowwise"):
        rival = layers.load(name)
        layers.load_weights(rival, rival.build(P), weights_of(P))
    assert torchao == ["tensorwise", "rowwise"]


def test_dtypes_follow_the_precision() -> None:
    assert changed(precision="fp8", recipe="delayed_scaling").dtype == torch.bfloat16
    assert changed(precision="bf16").attention_problem.dtype == "bf16"
    for name in ("te_basic", "te_fused", "te_layer"):
        module = layers.load(name).build(changed(precision="bf16"))
        assert {weight.dtype for weight in module.parameters()} == {torch.bfloat16}
