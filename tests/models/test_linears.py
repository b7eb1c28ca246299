"""Subclasses of nn.Linear in transformers that te.convert takes for Linears, by what they compute."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import te_bench.models as te

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("bias", [True, False])
def test_what_writes_the_product_in_its_own_way_is_a_linear(bias: bool) -> None:
    falcon = importlib.import_module("transformers.models.falcon.modeling_falcon")
    model = nn.Sequential(falcon.FalconLinear(32, 16, bias=bias))
    weight, x = model[0].weight, torch.randn(5, 32)
    expected = model(x)
    report = te.convert(model)
    assert isinstance(model[0], te.Linear)
    assert model[0].weight is weight
    assert report.converted[0].before == "FalconLinear"
    torch.testing.assert_close(model(x), expected)


def made(family: str, name: str, *arguments: Any) -> nn.Module:
    layer: nn.Module = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)(
        *arguments
    )
    return nn.Sequential(layer)


def test_what_computes_otherwise_stays() -> None:
    """Groups of channels; a router that picks."""
    router = transformers.Llama4TextConfig(hidden_size=32, num_local_experts=16)
    for model in (made("deepseek_v4", "DeepseekV4GroupedLinear", 32, 32, 2), made("llama4", "Llama4Router", router)):
        assert "may do more than that" in te.convert(model).kept[0].reason
