"""Whatever legal shape a module has and is given, odd ones too, under every recipe: its results are what they must be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fp8_emulation import Function, compute, faults, layernorm_linear, layernorm_mlp, linear
from hypothesis import given, settings
from hypothesis import strategies as st
from module_cases import RECIPES, parameters, randomise, results, settled
from torch import nn

import te_bench.models as te

MODULES: dict[str, tuple[Callable[..., nn.Module], Function]] = {
    "Linear": (te.Linear, linear),
    "LayerNormLinear": (te.LayerNormLinear, layernorm_linear),
    "LayerNormMLP": (te.LayerNormMLP, layernorm_mlp()),
}


@dataclass(frozen=True)
class Drawn:
    """A module (features, others) and its input (*batch, features)."""

    batch: tuple[int, ...]
    features: int
    others: int
    bias: bool
    dtype: torch.dtype
    seed: int


SIZES = st.one_of(st.integers(1, 40), st.sampled_from((64, 100, 127, 128, 129, 144)))  # 129: a second block of 1
DRAWN = st.builds(
    Drawn,
    batch=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    features=SIZES,
    others=SIZES,
    bias=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 2**16),
)


def shapes(module: str, drawn: Drawn) -> dict[str, tuple[int, ...]]:
    """Of y, dx and every parameter's gradient."""
    k, n = drawn.features, drawn.others
    x = (*drawn.batch, k)
    norm = {"layer_norm_weight": (k,), "layer_norm_bias": (k,)}
    if module == "LayerNormMLP":
        found = {
            "y": x,
            "dx": x,
            **norm,
            "fc1_weight": (n, k),
            "fc2_weight": (k, n),
            "fc1_bias": (n,),
            "fc2_bias": (k,),
        }
    else:
        found = {"y": (*drawn.batch, n), "dx": x, "weight": (n, k), "bias": (n,)}
        found |= norm if module == "LayerNormLinear" else {}
    return {name: shape for name, shape in found.items() if drawn.bias or name in norm or not name.endswith("bias")}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("module", MODULES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(drawn=DRAWN)
def test_any_shape(module: str, name: str, drawn: Drawn) -> None:
    make, function = MODULES[module]
    torch.manual_seed(drawn.seed)
    layer = randomise(make(drawn.features, drawn.others, bias=drawn.bias, device="cpu"))
    expected = shapes(module, drawn)
    x = (torch.randn(expected["dx"]) * 3 + 0.5).to(drawn.dtype)
    dy = ((torch.randn(expected["y"]) + 2) * 1e-3).to(drawn.dtype)  # around 0 a sum for a bias of 1 could be 0 nearly
    asked, fp8 = settled(layer, x, dy, name)
    ours = results(layer, x, dy, asked)
    assert {key: tuple(value.shape) for key, value in ours.items()} == expected
    dtypes: dict[str, Any] = {key: drawn.dtype if key in ("y", "dx") else torch.float32 for key in expected}
    assert {key: value.dtype for key, value in ours.items()} == dtypes
    assert all(value.isfinite().all() for value in ours.values())
    truth = compute(function, parameters(layer), x, dy, None, torch.float64)
    emulated = compute(function, parameters(layer), x, dy, fp8, drawn.dtype)
    if module != "Linear" and drawn.features < 4:  # the norm of 1 or 2 is constant: what rounding leaves of zeros
        for found in (ours, truth, emulated):
            found.pop("dx")
            found.pop("layer_norm_weight")
    assert not faults(ours, truth, emulated, drawn.dtype)
