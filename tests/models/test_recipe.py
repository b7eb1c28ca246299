"""Recipes: one contract over all of them, and per-tensor current scaling's own formats."""

import pytest
import torch

from te_bench.models import recipe as recipes
from te_bench.models.recipe import Format
from te_bench.models.recipe.float8_current_scaling import Float8CurrentScaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROLES = ("input", "weight", "grad_output")


@pytest.mark.parametrize("name", recipes.names())
def test_quantising_and_multiplying_is_nearly_multiplying(name: str) -> None:
    recipe = recipes.load(name)
    assert recipe.unsupported("cpu", None) is None
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 128, generator=generator), torch.randn(32, 128, generator=generator)
    for gemm, (left, right) in {
        "fprop": ("input", "weight"),
        "dgrad": ("grad_output", "weight"),
        "wgrad": ("grad_output", "input"),
    }.items():
        out = recipe.gemm(recipe.quantize(a, left), recipe.quantize(b, right), gemm, torch.float32)
        error = ((out - a @ b.t()).norm() / (a @ b.t()).norm()).item()
        assert out.shape == (64, 32)
        assert 0.02 < error < 0.08, gemm


@pytest.mark.parametrize(
    ("recipe", "formats"),
    [
        (recipes.load("float8_current_scaling"), [E4M3, E4M3, E5M2]),
        (Float8CurrentScaling(fp8_format=Format.E4M3), [E4M3, E4M3, E4M3]),
    ],
)
def test_formats_by_role(recipe: Float8CurrentScaling, formats: list[torch.dtype]) -> None:
    assert [recipe.quantize(torch.ones(16, 16), role)[0].dtype for role in ROLES] == formats


def test_each_tensor_is_scaled_by_its_own_amax() -> None:
    recipe = recipes.load("float8_current_scaling")
    for amax in (1e-6, 1.0, 300.0):
        data, inverse = recipe.quantize(torch.tensor([[amax, -amax / 2]]), "weight")
        assert data.float().tolist() == [[448.0, -224.0]]
        assert (data.float() * inverse)[0, 0].item() == pytest.approx(amax, rel=1e-6)


def test_fast_accumulation_is_for_fprop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_bench.kernels.gemm import reference

    seen = {}

    def spy(*operands: object, fast_accum: bool, **more: object) -> None:
        seen[len(seen)] = fast_accum

    monkeypatch.setattr(reference, "forward", spy)
    recipe = recipes.load("float8_current_scaling")
    packed = recipe.quantize(torch.ones(16, 16), "input")
    for gemm in ("fprop", "dgrad", "wgrad"):
        recipe.gemm(packed, packed, gemm, torch.float32)
    assert list(seen.values()) == [True, False, False]


def test_what_a_gpu_must_have() -> None:
    recipe = recipes.load("float8_current_scaling")
    assert recipe.unsupported("cuda", (9, 0)) is None
    assert recipe.unsupported("cuda", (8, 9)) is None
    assert "this GPU has 8.0" in str(recipe.unsupported("cuda", (8, 0)))


def test_unknown_recipe_names_its_neighbours() -> None:
    with pytest.raises(ValueError, match="Did you mean float8_current_scaling"):
        recipes.load("float8_curent_scaling")
