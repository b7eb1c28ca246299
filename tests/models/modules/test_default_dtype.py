"""torch.set_default_dtype decides what parameters are made of, and nothing else."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from module_cases import CASES, FAMILIES, RECIPES, TRANSFORMER, Case, randomise, results
from torch import Tensor

import te_bench.models as te
from te_bench.models import recipe

MODULES = {**CASES, "TransformerLayer": TRANSFORMER}


@pytest.fixture(autouse=True)
def _float32_again() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def steps(case: Case, asked: recipe.Recipe | None, device: str, **options: Any) -> list[dict[str, Tensor]]:
    """Two passes in bfloat16, so that the second casts by scales that the first one made; and the state they leave."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    module = randomise(case.make(48, **options)).to(device)
    found = []
    for _ in range(2):
        x, dy = (
            torch.randn(16, 2, 48, generator=generator, dtype=torch.float32).to(device, torch.bfloat16)
            for _ in range(2)
        )
        with torch.no_grad():
            dy = dy[..., : module(x).shape[-1]]
        found.append(results(module, x, dy, asked))
    return [*found, module.state_dict()]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("family", ["none", *FAMILIES])
def test_bfloat16_is_what_params_dtype_makes(family: str, name: str) -> None:
    check(family, name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_what_params_dtype_makes_on_a_gpu(family: str, name: str) -> None:
    check(family, name, "cuda")


def check(family: str, name: str, device: str) -> None:
    asked = None if family == "none" else RECIPES[family][0]
    expected = steps(MODULES[name], asked, device, params_dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    found = steps(MODULES[name], asked, device)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert {value.dtype for key, value in ours.items() if "fp8" not in key} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_delayed_scaling_under_other_defaults(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    x = torch.ones(8, 16, dtype=torch.float32)
    layer = te.Linear(16, 16)
    for _ in range(2):
        with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
            layer(x).sum().backward()
    state = {key: value.dtype for key, value in layer.state_dict().items()}
    assert {state.pop("weight"), state.pop("bias")} == {dtype}
    assert set(state.values()) == {torch.float32}
    assert te.numerics(layer)[""]["input"]["scale"] == 448.0


def test_numerics_and_evaluation_under_another_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    layer = te.LayerNormMLP(32, 48, activation="swiglu")
    with te.autocast(recipe=recipe.DelayedScaling()), te.record_numerics(), torch.no_grad():
        layer(torch.randn(8, 32))
    assert te.numerics(layer)[""]["fc1.input"]["scale"] == 1.0
