"""Every module under every recipe, forward and all gradients, against float64; and mutants, which must not pass."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_emulation import compute, faults
from module_cases import CASES, FAMILIES, RECIPES, TRANSFORMER, Case, parameters, randomise, results, settled
from torch import Tensor

import te_bench.models as te
from te_bench.kernels.quantize.backends import reference
from te_bench.models import recipe

SHAPES = [((16, 48), torch.float32), ((5, 49), torch.float32), ((7, 3, 144), torch.bfloat16), ((49,), torch.float32)]


def data(shape: tuple[int, ...], dtype: torch.dtype, out: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * 3 + 0.5
    dy = torch.randn((*shape[:-1], out), generator=generator) * 1e-3
    return x.to(device, dtype), dy.to(device, dtype)


def check(
    case: Case, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", **options: object
) -> None:
    torch.manual_seed(0)
    module = randomise(case.make(shape[-1], device=device, **options))
    out = module(torch.zeros(shape, device=device, dtype=dtype)).shape[-1]
    x, dy = data(shape, dtype, out, device)
    asked, fp8 = settled(module, x, dy, name)
    ours = results(module, x, dy, asked)
    ours.pop("self_attention.layernorm_qkv.key_bias", None)  # its gradient is 0, softmax being what it is: only noise
    truth = compute(case.function, parameters(module), x, dy, None, torch.float64)
    truth = {key: truth[key] for key in truth if not key.endswith("key_bias")}
    emulated = compute(case.function, parameters(module), x, dy, fp8, dtype)
    assert {ours["y"].dtype, ours["dx"].dtype} == {dtype}
    assert not faults(ours, truth, emulated, dtype)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("module", CASES)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES[1:], ids=str)
def test_fp8(module: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(CASES[module], name, shape, dtype)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("module", CASES)
def test_fp8_without_bias(module: str, name: str) -> None:
    check(CASES[module], name, (16, 48), torch.float32, bias=False)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_with_parameters_in_half_precision(name: str, dtype: torch.dtype) -> None:
    check(CASES["LayerNormMLP"], name, (16, 48), dtype, params_dtype=dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["current", "row", "block"])
def test_transformer_layer_in_fp8(name: str, device: str) -> None:
    # float32: bfloat16's own roundings, attention's among them, decide too many FP8 ones otherwise than the emulation.
    check(TRANSFORMER, name, (16, 2, 48), torch.float32, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("module", CASES)
@pytest.mark.parametrize(("shape", "dtype"), [*SHAPES, ((3, 100, 256), torch.bfloat16)], ids=str)
def test_fp8_on_a_gpu(module: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(CASES[module], name, shape, dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [*CASES, "TransformerLayer"])
def test_without_fp8(module: str, dtype: torch.dtype) -> None:
    """Error of ours <= 2 x the error of the same stored values in between, multiplied exactly, and a floor."""
    case = CASES.get(module, TRANSFORMER)
    torch.manual_seed(0)
    layer = randomise(case.make(48))
    x = torch.randn(8, 2, 48).to(dtype)
    dy = torch.randn_like(layer(x)) * 1e-3
    ours = results(layer, x, dy, None)
    truth = compute(case.function, parameters(layer), x, dy, None, torch.float64)
    emulated = compute(case.function, parameters(layer), x, dy, None, dtype)
    assert ours.keys() == truth.keys()
    ours.pop("self_attention.layernorm_qkv.key_bias", None)  # its gradient is 0: only noise
    for name, value in ours.items():
        # Weights are rounded to bfloat16 too, which the emulation leaves out: the floor.
        floor = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}[dtype] * truth[name].norm()
        assert (value.double() - truth[name]).norm() <= 2 * (emulated[name] - truth[name]).norm() + floor, name


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("module", ["Linear", "LayerNormMLP"])
def test_torch_autocast_computes_in_its_dtype_and_leaves_gradients_in_theirs(module: str, name: str) -> None:
    torch.manual_seed(0)
    layer = randomise(CASES[module].make(48))
    x, dy = data((16, 48), torch.float32, layer(torch.zeros(1, 48)).shape[-1])
    asked, _ = settled(layer, x, dy, name)
    twin = copy.deepcopy(layer)  # delayed scales and all
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = results(layer, x, dy, asked)
    same = results(twin, x.bfloat16(), dy.bfloat16(), asked)
    assert ours["y"].dtype == torch.bfloat16
    assert {value.dtype for key, value in ours.items() if key != "y"} == {torch.float32}
    for key, value in ours.items():
        assert torch.allclose(value.float(), same[key].float(), rtol=2**-6, atol=1e-3 * float(value.abs().max())), key


NARROW = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}
OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "encoder": lambda x: te.TransformerLayer(48, 96, 3, **NARROW)(x),
    "dropout": lambda x: te.TransformerLayer(48, 96, 3, device="cpu")(x),
    "parallel": lambda x: te.TransformerLayer(48, 96, 3, parallel_attention_mlp=True, **NARROW)(x),
    "decoder": lambda x: te.TransformerLayer(48, 96, 3, layer_type="decoder", **NARROW)(x, encoder_output=x),
    "residuals after the norms": lambda x: te.TransformerLayer(
        48, 96, 3, apply_residual_connection_post_layernorm=True, **NARROW
    )(x),
    "norm at the end": lambda x: te.TransformerLayer(48, 96, 3, output_layernorm=True, **NARROW)(x),
    "attention": lambda x: te.MultiheadAttention(
        48,
        3,
        input_layernorm=True,
        return_layernorm_output=True,
        return_bias=False,
        attention_dropout=0.0,
        device="cpu",
    )(x),
    "LayerNormLinear": lambda x: te.LayerNormLinear(48, 32, return_layernorm_output=True, device="cpu")(x),
    "LayerNormMLP": lambda x: te.LayerNormMLP(48, 96, return_layernorm_output=True, device="cpu")(x),
    "LayerNorm": lambda x: te.LayerNorm(48, device="cpu")(x),
    "RMSNorm": lambda x: te.RMSNorm(48, device="cpu")(x),
}


@pytest.mark.parametrize("name", ["none", "current"])
@pytest.mark.parametrize("module", OUTPUTS)
def test_outputs_are_of_torch_autocasts_dtype(module: str, name: str) -> None:
    x = torch.randn(16, 2, 48, requires_grad=True)
    asked = None if name == "none" else RECIPES[name][0]
    with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(enabled=asked is not None, recipe=asked):
        found = OUTPUTS[module](x)
    for y in found if isinstance(found, tuple) else (found,):
        assert y.dtype is torch.bfloat16
        y.float().sum().backward(retain_graph=True)
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("module", CASES)
def test_an_empty_batch_gives_empty_results_and_zero_gradients(module: str, name: str) -> None:
    layer = CASES[module].make(48)
    ours = results(
        layer, torch.empty(0, 2, 48), torch.empty(0, 2, layer(torch.zeros(1, 48)).shape[-1]), RECIPES[name][0]
    )
    assert ours["y"].shape[:2] == (0, 2)
    assert ours["dx"].shape == (0, 2, 48)
    assert all((ours[key] == 0).all() for key, _ in layer.named_parameters())


# ---- mutants: recipes with a fault each. What a module computes passes through its recipe.


class _Zeroed(recipe.Float8CurrentScaling):
    def gemm(self, *operands, **more):  # type: ignore[no-untyped-def]
        return super().gemm(*operands, **more) * 0


class _Flipped(recipe.Float8CurrentScaling):
    def gemm(self, a, b, gemm, *more):  # type: ignore[no-untyped-def]
        return super().gemm(a, b, gemm, *more) * (-1 if gemm == "dgrad" else 1)


class _DoubledScale(recipe.Float8CurrentScaling):
    def quantize(self, x, role, *more, **options):  # type: ignore[no-untyped-def]
        q = super().quantize(x, role, *more, **options)
        return q._replace(scale_inv_t=q.scale_inv_t * 2) if role == "weight" and q.scale_inv_t is not None else q


class _WrongFormat(recipe.Float8CurrentScaling):
    def dtype(self, role: str) -> torch.dtype:
        return torch.float8_e4m3fn


class _WrongFormatForward(recipe.Float8CurrentScaling):
    def dtype(self, role: str) -> torch.dtype:
        return torch.float8_e5m2 if role == "input" else super().dtype(role)


class _DroppedTile(recipe.Float8CurrentScaling):
    def gemm(self, a, b, gemm, *more):  # type: ignore[no-untyped-def]
        k = a.data.shape[1] - 16 if gemm == "wgrad" else a.data.shape[1]
        return super().gemm(*(x._replace(data=x.data[:, :k].contiguous()) for x in (a, b)), gemm, *more)


class _StaleScale(recipe.Float8CurrentScaling):
    """Casts by the scale of values 1.37 x as large as the present ones, e.g. an earlier step's."""

    def quantize(self, x, role, slot, *, column_sum=None, **options):  # type: ignore[no-untyped-def]
        if column_sum is not None:
            column_sum += x.float().sum(0)
        scale = torch.finfo(self.dtype(role)).max / (1.37 * x.abs().amax().float())
        return reference.quantize(x, self.dtype(role), scale=scale, **options)


class _TransposedWeight(recipe.Float8CurrentScaling):
    def gemm(self, a, b, gemm, *more):  # type: ignore[no-untyped-def]
        return super().gemm(a, b._replace(data=b.data.t().contiguous()) if gemm == "fprop" else b, gemm, *more)


class _NoBiasGradient(recipe.Float8CurrentScaling):
    def quantize(self, x, role, *more, **options):  # type: ignore[no-untyped-def]
        return super().quantize(x, role, *more, **{**options, "column_sum": None})


class _HighPrecisionWgrad(recipe.Float8CurrentScaling):
    def quantize(self, x, role, *more, **options):  # type: ignore[no-untyped-def]
        q = super().quantize(x, role, *more, **options)
        if role == "weight" or q.data_t is None:
            return q
        return q._replace(data_t=x.t().contiguous(), scale_inv_t=torch.ones(()))

    def gemm(self, a, b, gemm, out_dtype, bias=None):  # type: ignore[no-untyped-def]
        if gemm == "wgrad":
            return (a.data.float() @ b.data.float().t()).to(out_dtype)
        return super().gemm(a, b, gemm, out_dtype, bias)


MUTANTS = (
    _Zeroed,
    _Flipped,
    _DoubledScale,
    _WrongFormat,
    _WrongFormatForward,
    _DroppedTile,
    _StaleScale,
    _TransposedWeight,
    _NoBiasGradient,
    _HighPrecisionWgrad,
)


@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mutant", [None, *MUTANTS], ids=lambda m: getattr(m, "__name__", "none"))
def test_no_mutant_passes(mutant: type[recipe.Float8CurrentScaling] | None, module: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make = {"Linear": te.Linear, "LayerNormLinear": te.LayerNormLinear, "LayerNormMLP": te.LayerNormMLP}[module]
    layer = randomise(make(64, 64))
    x, dy = data((48, 64), dtype, 64)
    ours = results(layer, x, dy, recipe.Float8CurrentScaling() if mutant is None else mutant())
    truth, emulated = (
        compute(CASES[module].function, parameters(layer), x, dy, fp8, stored)
        for fp8, stored in ((None, torch.float64), (RECIPES["current"][1], dtype))
    )
    assert bool(faults(ours, truth, emulated, dtype)) == (mutant is not None)
