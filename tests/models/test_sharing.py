"""One layer's parameters in five layers, and Transformer Engine's state dicts in ours."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import recipe, sharing

HIDDEN, FFN, HEADS, LENGTH, BATCH = 48, 96, 3, 10, 2
EXAMPLES = Path(__file__).parents[2] / "examples"
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The quickstart's layers."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("te_quickstart")


def plain(layers: Any) -> nn.Module:
    """The quickstart's first layer, with biases and gains that show."""
    torch.manual_seed(0)
    layer: nn.Module = layers.BasicTransformerLayer(HIDDEN, FFN, HEADS, **NO_DROPOUT)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) * (0.3 if p.dim() == 1 else 0.1))
    return layer


def a_te_layer(layers: Any, kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    if kind == "transformer":
        layer: nn.Module = te.TransformerLayer(HIDDEN, FFN, HEADS, **NO_DROPOUT, device="cpu", **options)
    else:
        layer = getattr(layers, f"{kind}TETransformerLayer")(HIDDEN, FFN, HEADS, **NO_DROPOUT).cpu()
    return layer


SHARE = {
    "Basic": sharing.share_parameters_with_basic_te_model,
    "Fused": sharing.share_parameters_with_fused_te_model,
    "transformer": sharing.share_parameters_with_transformerlayer_te_model,
}
SPLIT_NAMES = {f"{name}_{kind}" for name in ("query", "key", "value") for kind in ("weight", "bias")}
BY_QKV = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
VARIANTS = [  # kind, options, parameters of the QKV projection that are copies
    pytest.param("Basic", {}, set(), id="basic"),
    pytest.param("Fused", {}, set(), id="fused"),
    pytest.param("transformer", {}, SPLIT_NAMES, id="layer"),
    pytest.param("transformer", {"fuse_qkv_params": True}, set(), id="layer, interleaved"),
    pytest.param("transformer", BY_QKV, {"weight", "bias"}, id="layer, by q k v"),
]


def run(layer: nn.Module, mask: str) -> tuple[Tensor, Tensor]:
    """The output and the input's gradient."""
    x = torch.randn(LENGTH, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
    if isinstance(layer, te.TransformerLayer):
        y = layer(x, self_attn_mask_type=mask)
    else:
        above = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        y = layer(x, attention_mask=above if mask == "causal" else None)
    y.square().mean().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize(("kind", "options", "copies"), VARIANTS)
def test_every_variant_computes_what_the_plain_layer_does(layers, kind, options, copies, mask):
    basic, ours = plain(layers), a_te_layer(layers, kind, **options)
    expected = run(basic, mask)
    assert not torch.allclose(run(ours, mask)[0], expected[0], atol=0.1)
    SHARE[kind](ours, basic)
    for got, exact in zip(run(ours, mask), expected, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5 * exact.abs().max().item())


@pytest.mark.parametrize(("kind", "options", "copies"), VARIANTS)
def test_parameters_are_shared_where_their_rows_agree(layers, kind, options, copies):
    basic, ours = plain(layers), a_te_layer(layers, kind, **options)
    frozen = basic.get_parameter("qkv_projection.weight").requires_grad_(False)
    SHARE[kind](ours, basic)
    theirs = {id(p) for p in basic.parameters()}
    own = {name for name, p in ours.named_parameters() if id(p) not in theirs}
    assert own == {f"self_attention.layernorm_qkv.{name}" for name in copies}
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in basic.parameters())
    assert sum(p.numel() for p in ours.parameters() if not p.requires_grad) == frozen.numel()
    assert list(ours.state_dict()) == list(a_te_layer(layers, kind, **options).state_dict())


def test_other_sizes_and_other_layers_are_named(layers: Any) -> None:
    basic = plain(layers)
    wide = te.TransformerLayer(2 * HIDDEN, FFN, HEADS, device="cpu")
    with pytest.raises(ValueError, match=r"layer_norm_weight is \(96,\), the plain layer's \(48,\)"):
        sharing.share_parameters_with_transformerlayer_te_model(wide, basic)
    with pytest.raises(ValueError, match=r"TransformerLayer has no parameter ln1\.weight"):
        sharing.share_parameters_with_basic_te_model(wide, basic)
    with pytest.raises(ValueError, match=r"has no parameter ln_qkv\.layer_norm_weight"):
        sharing.share_parameters_with_fused_te_model(a_te_layer(layers, "Basic"), basic)


# ---- state dicts as Transformer Engine writes them

NORM = {"layer_norm_weight": (32,), "layer_norm_bias": (32,)}
MLP = {**NORM, "fc1_weight": (64, 32), "fc1_bias": (64,), "fc2_weight": (32, 64), "fc2_bias": (32,)}
FUSED = {"weight": (96, 32), "bias": (96,)}
SPLIT = {
    f"{name}_{kind}": (32, 32)[: 2 if kind == "weight" else 1]
    for name in ("query", "key", "value")
    for kind in ("weight", "bias")
}


def under(prefix: str, shapes: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


EXTRA = {"_extra_state": None}
ATTENTION = {**under("core_attention", EXTRA), **under("proj", {"weight": (32, 32), "bias": (32,), **EXTRA})}


def a_layer_dict(qkv: dict[str, Any]) -> dict[str, Any]:
    attention = {**under("layernorm_qkv", {**NORM, **qkv, **EXTRA}), **ATTENTION}
    return {**under("self_attention", attention), **under("layernorm_mlp", {**MLP, **EXTRA})}


def the_modules() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    on: dict[str, Any] = {"device": "cpu"}
    norm = {"weight": (32,), "bias": (32,), **EXTRA}
    return {
        "Linear": (te.Linear(32, 96, **on), {**FUSED, **EXTRA}),
        "Linear, split": (te.Linear(32, 96, parameters_split=("query", "key", "value"), **on), {**SPLIT, **EXTRA}),
        "LayerNorm": (te.LayerNorm(32, **on), norm),
        "RMSNorm": (te.RMSNorm(32, **on), {"weight": (32,), **EXTRA}),
        "LayerNormLinear": (te.LayerNormLinear(32, 96, **on), {**NORM, **FUSED, **EXTRA}),
        "LayerNormMLP": (te.LayerNormMLP(32, 64, **on), {**MLP, **EXTRA}),
        "MultiheadAttention": (te.MultiheadAttention(32, 2, **on), {**under("qkv", {**SPLIT, **EXTRA}), **ATTENTION}),
        "MultiheadAttention, fused": (
            te.MultiheadAttention(32, 2, fuse_qkv_params=True, **on),
            {**under("qkv", {**FUSED, **EXTRA}), **ATTENTION},
        ),
        "TransformerLayer": (te.TransformerLayer(32, 64, 2, **on), a_layer_dict(SPLIT)),
        "TransformerLayer, fused": (te.TransformerLayer(32, 64, 2, fuse_qkv_params=True, **on), a_layer_dict(FUSED)),
    }


class Bomb:
    """Unpickled, it fails the test."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("extra state was unpickled",)


@pytest.mark.parametrize("extra", ["none", "empty", "pickled"])
@pytest.mark.parametrize("name", the_modules())
def test_a_state_dict_of_transformer_engine_loads_strictly(name: str, extra: str) -> None:
    import pickle

    module, shapes = the_modules()[name]
    states = {
        "none": None,
        "empty": torch.empty(0, dtype=torch.uint8),
        "pickled": torch.frombuffer(bytearray(pickle.dumps(Bomb())), dtype=torch.uint8),
    }
    torch.manual_seed(0)
    saved = {key: states[extra] if shape is None else torch.randn(shape) for key, shape in shapes.items()}
    module.load_state_dict(saved, strict=True)
    weights = {key for key, shape in shapes.items() if shape is not None}
    assert set(module.state_dict()) == weights
    for key, value in module.state_dict().items():
        assert torch.equal(value, saved[key])  # type: ignore[arg-type]
    assert set(saved) == set(shapes)


def test_missing_and_unexpected_keys_are_still_named() -> None:
    module, shapes = the_modules()["LayerNormMLP"]
    saved = {key: torch.randn(shape) for key, shape in shapes.items() if shape is not None and key != "fc2_bias"}
    with pytest.raises(RuntimeError, match="fc2_bias"):
        module.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="fc3_bias"):
        module.load_state_dict({**saved, "fc2_bias": torch.randn(32), "fc3_bias": torch.randn(32)})


def test_loaded_weights_run_in_fp8() -> None:
    module, shapes = the_modules()["TransformerLayer"]
    saved = {key: None if shape is None else torch.randn(shape) * 0.2 for key, shape in shapes.items()}
    module.load_state_dict({k: v for k, v in saved.items() if "core_attention" not in k})
    module.eval()
    x = torch.randn(16, 2, 32)
    exact = module(x)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe.DelayedScaling()):
        near = module(x)
    assert 1e-3 < ((near - exact).norm() / exact.norm()).item() < 0.1
