"""Modules made on the meta device take no memory until reset_parameters, which puts them where others are made."""

from typing import Any

import pytest
import torch
from torch import nn

import te_bench.models as te

SIZES: dict[str, tuple[Any, ...]] = {
    "Linear": (32, 48),
    "LayerNorm": (32,),
    "RMSNorm": (32,),
    "LayerNormLinear": (32, 48),
    "LayerNormMLP": (32, 48),
    "MultiheadAttention": (32, 2),
    "TransformerLayer": (32, 48, 2),
}


def made(module: str, **options: Any) -> nn.Module:
    torch.manual_seed(7)
    return getattr(te, module)(*SIZES[module], **options)


def resettable(module: nn.Module) -> list[Any]:
    return [child for child in module.modules() if hasattr(child, "reset_parameters")]


@pytest.mark.parametrize("module", SIZES)
def test_reset_parameters_makes_what_the_constructor_would_have(module: str) -> None:
    expected, deferred = made(module), made(module, device="meta", params_dtype=torch.float32)
    assert all(p.is_meta for p in deferred.parameters())
    for child in resettable(deferred):
        child.reset_parameters(defer_init=True)
    assert all(p.is_meta for p in deferred.parameters())
    torch.manual_seed(7)
    for child in resettable(deferred):
        child.reset_parameters()
    for (name, p), (own, q) in zip(expected.named_parameters(), deferred.named_parameters(), strict=True):
        assert name == own
        assert p.device == q.device
        assert p.dtype == q.dtype
        assert p.requires_grad == q.requires_grad
        assert torch.equal(p, q), name


def test_what_to_empty_moved_stays_where_it_is_and_marks_stay() -> None:
    layer = made("Linear", device="meta")
    layer.weight.tensor_model_parallel = True
    layer.bias.requires_grad_(False)
    moved = made("Linear", device="meta").to_empty(device="cpu")
    weight = moved.weight
    moved.reset_parameters()
    assert moved.weight is weight
    assert 0.01 < weight.std() < 0.04
    layer.reset_parameters()
    assert layer.weight.tensor_model_parallel
    assert not layer.bias.requires_grad
