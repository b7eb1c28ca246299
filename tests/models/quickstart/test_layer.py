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
from te_bench.models import decoder, decoder_layer
from te_bench.models import quickstart as layers
from te_bench.models import recipe as recipes
from te_bench.models.configs import LlamaConfig, configs
from te_bench.models.quickstart import LayerConfig, plain, transformer_engine
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
            if name.startswith("ln") or "_norm" in name:
                weight.copy_(torch.rand_like(weight) + 0.5)
    return {name: weight.detach().to(p.dtype) for name, weight in plain.named_parameters()}


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", HERE)
def test_a_rival_is_the_plain_layer(name: str, mask: str) -> None:
    wide = changed(mask=mask, attention="manual", precision="fp64")
    weights = weights_of(wide)
    truth = results("plain", wide, weights)
    p = changed(mask=mask, attention="manual" if name == "plain" else "flash")
    assert_close(results(name, p, weights), truth)


def assert_close(ours: dict[str, Any], truth: dict[str, Any]) -> None:
    assert ours.keys() == truth.keys()
    for key, value in truth.items():
        assert value is not None
        torch.testing.assert_close(ours[key], value.float(), rtol=1e-4, atol=2e-5, msg=lambda m, key=key: f"{key}: {m}")


#: As Llama's, with norms of heads, too, whose features are not hidden / heads.
OTHER = {**decoder_layer.settings("llama-tiny"), "eps": 1e-3, "qk_norm": True}


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("name", HERE)
def test_a_rival_is_the_plain_layer_of_a_model(name: str, by_head: bool) -> None:
    of_model = {**OTHER, "by_head": by_head}
    wide = changed(attention="manual", precision="fp64", **of_model)
    weights = weights_of(wide)
    assert {key: tuple(weight.shape) for key, weight in weights.items()} == {
        "ln1.weight": (32,),
        "qkv_projection.weight": ((4 + 2 + 2) * 16, 32),
        "heads.q_norm.weight": (16,),
        "heads.k_norm.weight": (16,),
        "projection.weight": (32, 64),
        "ln2.weight": (32,),
        "mlp.linear1.weight": (96, 32),
        "mlp.linear2.weight": (32, 48),
    }
    truth = results("plain", wide, weights)
    assert_close(results(name, changed(attention="manual" if name == "plain" else "flash", **of_model), weights), truth)


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-0.6b"])
def test_the_plain_layer_of_a_model_is_the_models_own(name: str) -> None:
    """Its first layer and last norm, whose weights it has by the parts that the model names."""
    config = configs()[name]
    torch.manual_seed(0)
    model = decoder.build(dataclasses.replace(config, vocab_size=1, block_size=12, **{config.LAYERS: 1}))
    attention, mlp = model.parts()
    shape = config.shape
    sizes = {"hidden": shape.hidden, "ffn": shape.ffn, "heads": shape.heads, "sequence": 12}
    module = layers.load("plain_sdpa").build(changed(**sizes, **decoder_layer.settings(name)))
    with torch.no_grad():
        for part in (attention.qkv, attention.proj, mlp.up, mlp.down):  # type: ignore[union-attr]
            part.weight.mul_(5)  # so that much is added to the stream
        for norm in (attention.norm, mlp.norm):
            norm.weight.uniform_(0.5, 1.5)
    own = {
        "ln1": attention.norm,
        "qkv_projection": attention.qkv,  # type: ignore[union-attr]
        "projection": attention.proj,  # type: ignore[union-attr]
        "ln2": mlp.norm,
        "mlp.linear1": mlp.up,  # type: ignore[union-attr]
        "mlp.linear2": mlp.down,  # type: ignore[union-attr]
    }
    if shape.head_norms:
        own |= {"heads.q_norm": attention.q_norm, "heads.k_norm": attention.k_norm}  # type: ignore[union-attr]
    weights = {f"{ours}.weight": part.weight for ours, part in own.items()}
    layers.load_weights(layers.load("plain_sdpa"), module, weights)
    x = torch.randn(2, 12, shape.hidden)
    with torch.no_grad():
        found = model.tables().norm(module(x.transpose(0, 1)).transpose(0, 1))
        torch.testing.assert_close(found, model.body(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "of its Linears some have a bias and some have none"),
        ({"qk_norm": True, "rms_norm_eps": 0.5}, None),
        (None, "its LayerNorms have no bias"),
    ],
)
def test_a_layer_that_no_rival_builds_says_why(monkeypatch, changes, reason):
    llama = configs()["llama-tiny"]
    assert isinstance(llama, LlamaConfig)
    config = configs()["tiny"] if changes is None else dataclasses.replace(llama, **changes)
    monkeypatch.setattr(decoder_layer, "configs", lambda: {"mine": config})
    found = decoder_layer.unlike("mine")
    assert found is None if reason is None else reason in str(found)


def test_an_activation_that_the_plain_layer_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(plain.ACTIVATIONS) == decoder_layer.ACTIVATIONS
    model = decoder.build(dataclasses.replace(configs()["llama-tiny"], num_hidden_layers=1))  # type: ignore[call-arg]
    attention, mlp = model.parts()
    gated = mlp._replace(activation="geglu")  # type: ignore[call-arg]
    monkeypatch.setattr(model, "parts", lambda: (attention, gated))
    monkeypatch.setattr(decoder, "build", lambda config: model)
    assert decoder_layer.unlike("llama-tiny") == "its activation is geglu, and the plain layer's gelu or swiglu"


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
        layers.recipe_of(p)


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
def test_what_a_rival_cannot_do_has_a_reason(monkeypatch, name, changes, reason):
    rival = layers.load(name)
    with monkeypatch.context() as installed:
        installed.setattr("importlib.util.find_spec", lambda package: None)
        found = rival.unsupported(changed(**changes))
    assert found is not None
    assert re.search(reason, found)


@pytest.mark.parametrize("name", ["te_layer", "te_basic", "te_fused"])
def test_a_layer_by_itself_is_none_of_the_last_blocks(name: str) -> None:
    """It would compute in the recipe's format under the name of a recipe that keeps bf16."""
    for changes in ({"recipe": "nvfp4_block_scaling_bf16_end"}, {"settings": {"bf16_last": 1 / 6}}):
        found = layers.load(name).unsupported(changed(**{**FP8, **changes}))
        assert found is not None
        assert "bf16_last 0.167: a layer by itself is none of a model's last blocks" in found
    found = layers.load(name).unsupported(changed(**FP8, settings={"bf16_first": 0.5}))
    assert "bf16_first 0.5: a layer by itself is none of a model's first blocks" in found


def test_transformer_engine_is_built_as_ours_and_its_recipe_gets_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of the package: the arguments and parameter names are te.TransformerLayer's."""
    pytorch, common = types.ModuleType("transformer_engine.pytorch"), types.ModuleType("transformer_engine.common")
    asked: dict[str, Any] = {}
    monkeypatch.setattr(pytorch, "TransformerLayer", te.TransformerLayer, raising=False)
    monkeypatch.setattr(pytorch, "autocast", lambda **given: contextlib.nullcontext(asked.update(given)), raising=False)
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
    of_model = changed(**OTHER)
    module = transformer_engine.build(of_model)
    layers.load_weights(transformer_engine.LAYER, module, weights_of(of_model))
    assert module(torch.rand(P.sequence, P.batch, P.hidden)).shape == (P.sequence, P.batch, P.hidden)
    p = changed(precision="fp8", recipe="delayed_scaling", settings={"amax_history_len": 16})
    with transformer_engine.context(p)():
        pass
    assert asked == {"recipe": recipes.DelayedScaling(amax_history_len=16)}


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
