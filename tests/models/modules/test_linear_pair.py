"""te.Linear on a GPU's path, by the interpreter: input and weight cast in one launch are what two launches make of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import te_bench.models as te
from te_bench.kernels.gemm.backends import reference
from te_bench.kernels.quantize import Operand
from te_bench.kernels.quantize.backends import triton as quantize_triton
from te_bench.models import recipe
from te_bench.models.recipe import Recipe

BF16 = torch.bfloat16
GEMM = Recipe.gemm


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Triton's quantisers, and the reference for GEMMs; the list tells of each call whether it took one launch."""
    taken: list[bool] = []
    cast = quantize_triton.quantize_pair

    def counted(*given: Any) -> Any:
        made = cast(*given)
        taken.append(made is not None)
        return made

    def gemm(
        _: Recipe, a: Operand, b: Operand, gemm: str, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        return reference.forward(a, b, out_dtype=out_dtype, bias=bias)

    monkeypatch.setattr(Recipe, "_emulated", lambda *_: False)
    monkeypatch.setattr(Recipe, "gemm", gemm)
    monkeypatch.setattr(quantize_triton, "quantize_pair", counted)
    return taken


def linear(weight: Tensor | None = None, **options: Any) -> te.Linear:
    torch.manual_seed(0)
    layer = te.Linear(32, 48, params_dtype=BF16, device="cpu", **options)
    if weight is not None:
        layer.weight = nn.Parameter(weight)
    return layer


def outcome(layer: te.Linear, x: Tensor) -> list[Tensor]:
    """Two steps: outputs, gradients, amaxes of input and weight, scales."""
    found = []
    x = x.detach().requires_grad_()
    for _ in range(2):
        with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
            y = layer(x)
        found.append(y.detach())
        y.float().square().sum().backward()
    found += [p.grad for p in (x, *layer.parameters()) if p.grad is not None]
    state = layer.recipe_state()
    return [*found, state["amax_history_fwd"].clone(), state["scale_fwd"].clone()]


WEIGHTS: dict[str, Callable[[], Tensor | None]] = {
    "plain": lambda: None,
    "transposed": lambda: torch.randn(32, 48, dtype=BF16).t(),
    "every other": lambda: torch.randn(48, 64, dtype=BF16)[:, ::2],
    "slice": lambda: torch.randn(60, 40, dtype=BF16)[7:55, 3:35],
    "float16": lambda: torch.randn(48, 32, dtype=torch.float16),
}


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("shape", [(16, 32), (2, 5, 32)])
def test_one_launch_is_two(pairs, weight, shape, monkeypatch):
    torch.manual_seed(1)
    given, x = WEIGHTS[weight](), 3 * torch.randn(*shape, dtype=BF16)
    one = outcome(linear(given), x)
    assert pairs == [True, True]
    monkeypatch.setattr(quantize_triton, "quantize_pair", lambda *_: None)
    two = outcome(linear(given), x)
    assert len(one) == len(two) == 7
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    history, scale = one[-2:]
    assert history.amax(0)[0] != history.amax(0)[1] != 0  # input and weight have amaxes of their own
    assert scale[0] != scale[1]


def test_what_a_pair_cannot_take_is_cast_or_refused_one_by_one(pairs: list[bool]) -> None:
    x = torch.randn(16, 32, dtype=BF16)
    with te.autocast(recipe=recipe.DelayedScaling()):
        linear()(x[:0])
        with pytest.raises(ValueError, match="K is 32"):
            linear(torch.randn(48, 16, dtype=BF16))(x)
        with pytest.raises(ValueError, match="float64"):
            linear(torch.randn(48, 32, dtype=torch.float64))(x)
    assert pairs == [False] * 3


def test_counted_casts_are_counted_one_by_one(pairs: list[bool]) -> None:
    layer = linear()
    with te.autocast(recipe=recipe.DelayedScaling()), te.record_numerics():
        layer(1e4 * torch.randn(16, 32, dtype=BF16))
    assert pairs == []
    assert te.numerics(layer)[""]["input"]["saturated"] > 0


def test_no_transpose_is_made_that_nobody_reads(pairs: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []
    cast = quantize_triton.quantize_pair
    monkeypatch.setattr(quantize_triton, "quantize_pair", lambda *given: (asked.append(given[-2:]), cast(*given))[1])
    layer, x = linear(), torch.randn(16, 32, dtype=BF16)
    with te.autocast(recipe=recipe.DelayedScaling()):
        layer(x)
        layer(x.requires_grad_())
        with torch.no_grad():
            layer(x)
        layer.weight.requires_grad_(False)
        layer(x)
    assert asked == [(True, False), (True, True), (False, False), (False, True)]  # (x's for dw, the weight's for dx)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_a_parametrised_weight_is_the_one_used(pairs: list[bool]) -> None:
    layer, x = linear(bias=False), torch.randn(16, 32, dtype=BF16)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        plain = layer(x)
        parametrize.register_parametrization(layer, "weight", Doubled())
        assert torch.equal(layer(x), 2 * plain)
        swapped = torch.func.functional_call(
            layer, {"parametrizations.weight.original": torch.zeros(48, 32, dtype=BF16)}, x
        )
    assert not swapped.any()
