"""What no module can be made with is refused by its constructor, which names the value and what is legal."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import te_bench.models as te

#: A module that can be made, by the arguments that `check` knows.
SOUND: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "Linear": (te.Linear, {"in_features": 32, "out_features": 48, "params_dtype": None}),
    "LayerNormLinear": (
        te.LayerNormLinear,
        {"in_features": 32, "out_features": 48, "eps": 1e-5, "params_dtype": None},
    ),
    "LayerNorm": (te.LayerNorm, {"normalized_shape": 32, "eps": 1e-5, "params_dtype": None}),
    "RMSNorm": (te.RMSNorm, {"normalized_shape": 32, "eps": 1e-5, "params_dtype": None}),
    "LayerNormMLP": (te.LayerNormMLP, {"hidden_size": 32, "ffn_hidden_size": 48, "eps": 1e-5, "params_dtype": None}),
    "DotProductAttention": (
        te.DotProductAttention,
        {"num_attention_heads": 4, "kv_channels": 8, "num_gqa_groups": 2, "attention_dropout": 0.0},
    ),
    "MultiheadAttention": (
        te.MultiheadAttention,
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "kv_channels": 8,
            "num_gqa_groups": 2,
            "attention_dropout": 0.0,
            "layernorm_epsilon": 1e-5,
            "qk_norm_eps": 1e-6,
            "params_dtype": None,
        },
    ),
    "TransformerLayer": (
        te.TransformerLayer,
        {
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "kv_channels": 8,
            "num_gqa_groups": 2,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "layernorm_epsilon": 1e-5,
            "params_dtype": None,
        },
    ),
    "RotaryPositionEmbedding": (te.RotaryPositionEmbedding, {"dim": 8, "rotary_base": 1e4}),
}
SIZE = (0, -16, 32.0, True, np.float64(32), "32", float("nan"))
EPSILON = (0, 0.0, -1e-5, float("nan"), float("inf"), True, "1e-5", 1e-5j)
IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    "eps": (*EPSILON, None),
    "layernorm_epsilon": (*EPSILON, None),
    "qk_norm_eps": (*EPSILON, None),
    "rotary_base": (*EPSILON, None),
    "hidden_dropout": (-0.1, 1.1, float("nan"), True, "0.1", None),
    "attention_dropout": (-0.1, 1.0, 1.1, float("nan"), False, "0.1", None),
    "params_dtype": (torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, "bfloat16", float),
    "num_gqa_groups": SIZE,
    "kv_channels": SIZE,
}
WORDS = {
    "eps": "a number greater than 0",
    "layernorm_epsilon": "a number greater than 0",
    "qk_norm_eps": "a number greater than 0",
    "rotary_base": "a number greater than 0",
    "hidden_dropout": "a probability: from 0 to 1",
    "attention_dropout": "a probability: at least 0 and less than 1",
    "params_dtype": "a dtype of parameters: torch.float32, torch.bfloat16, torch.float16, torch.float64 or None",
}


def made(module: str, **options: Any) -> nn.Module:
    make, sound = SOUND[module]
    return make(**{**sound, **options})


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, (_, sound) in SOUND.items() for name in sound])
def test_an_impossible_argument_is_named_with_what_is_legal(module: str, name: str) -> None:
    made(module)
    for value in IMPOSSIBLE.get(name, (*SIZE, None)):
        with pytest.raises(ValueError) as told:
            made(module, **{name: value})
        where, _, said = str(told.value).partition(": ")
        assert said.startswith(f"{name}={value!r} is not {WORDS.get(name, 'a whole number of at least 1')}")
        assert where in (module, "MultiheadAttention")  # a TransformerLayer's part says it


@pytest.mark.parametrize("channels", [None, (8, 0), (8, 1.5), (8,), (8, 8, 8), (8, None)])
def test_channels_of_keys_and_values(channels: Any) -> None:
    with pytest.raises(ValueError, match="kv_channels="):
        te.DotProductAttention(4, channels)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("LayerNorm", {"normalized_shape": (32,), "eps": 1e-3}),
        ("LayerNorm", {"normalized_shape": [32], "eps": 1}),
        ("RMSNorm", {"normalized_shape": torch.Size((32,)), "eps": np.float32(1e-6)}),
        ("LayerNormMLP", {"hidden_size": np.int64(32), "ffn_hidden_size": 1, "params_dtype": torch.float64}),
        ("MultiheadAttention", {"kv_channels": None, "num_gqa_groups": None, "params_dtype": torch.bfloat16}),
        ("TransformerLayer", {"hidden_dropout": 1, "attention_dropout": 0, "params_dtype": torch.float16}),
        ("RotaryPositionEmbedding", {"rotary_base": 500_000}),
    ],
)
def test_what_is_unusual_and_possible(module: str, options: dict[str, Any]) -> None:
    layer = made(module, **options)
    dtype = options.get("params_dtype")
    assert all(p.dtype == dtype for p in layer.parameters() if dtype is not None)


def test_no_epsilon_of_the_users_is_dropped_on_its_way_down() -> None:
    layer = te.TransformerLayer(32, 48, 4, layernorm_epsilon=0.25, qk_norm_type="RMSNorm", qk_norm_eps=0.5)
    assert layer.self_attention.layernorm_qkv.norm.eps == layer.layernorm_mlp.norm.eps == 0.25
    assert layer.self_attention.q_norm.eps == 0.5
