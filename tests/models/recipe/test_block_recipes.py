"""MXFP8 and NVFP4 as recipes: the noise of every GEMM by theory, and what must not pass for it; seeds, settings, layers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import te_bench.models as te
from te_bench.kernels.gemm import block_formats as gemms
from te_bench.kernels.gemm import block_scaled
from te_bench.kernels.quantize import Operand
from te_bench.models import decoder, recipe
from te_bench.models.configs import configs
from te_bench.models.recipe import Format, MXFP8BlockScaling, NVFP4BlockScaling, Recipe, Slot

ROLES = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
SIZE = 512
Noise = dict[str, float]


def operands(asked: Recipe, gemm: str, seed: int = 0) -> tuple[Tensor, Operand, Operand]:
    """Of normal numbers: the exact product (M, N), and both sides as their GEMM reads them."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(SIZE, SIZE, generator=generator).bfloat16() for _ in range(2))
    torch.manual_seed(seed)
    rowwise = (gemm != "wgrad", gemm == "fprop")  # else contracted along the rows of what is cast
    found = []
    for x, role, way in zip((a, b), ROLES[gemm], rowwise, strict=True):
        q = asked.quantize(x if way else x.t().contiguous(), role, Slot(), rowwise=way, columnwise=not way)
        found.append(q.by_rows() if way else q.by_columns())
    return a.double() @ b.double().t(), *found


def sqnr(value: Tensor, exact: Tensor) -> float:
    return 20 * torch.log10(exact.norm() / (value.double() - exact).norm()).item()


def of_a_gemm(asked: Recipe, gemm: str) -> float:
    exact, a, b = operands(asked, gemm)
    return sqnr(asked.gemm(a, b, gemm, torch.float32), exact)


def theory(of_a: float, of_b: float) -> float:
    """dB of a product whose sides have independent errors."""
    return -10 * math.log10(10 ** (-of_a / 10) + 10 ** (-of_b / 10) + 10 ** (-(of_a + of_b) / 10))


def nvfp4_noise(high: int, stochastic: bool) -> float:
    """dB of normal numbers in NVFP4 by blocks of high x 16, in float64 with exact scales but for E4M3's rounding."""
    draws = np.random.default_rng(1)
    x = draws.standard_normal((SIZE // high, high, SIZE // 16, 16))
    tensor = np.abs(x).max() / 2688
    wanted = np.abs(x).max((1, 3), keepdims=True) / 6 / tensor
    exponent = np.floor(np.log2(wanted)) - 3
    scale = np.minimum(np.rint(wanted / 2**exponent) * 2**exponent, 448) * tensor
    y = np.minimum(np.abs(x) / scale, 6)
    step = np.where(y < 2, 0.5, np.where(y < 4, 1, 2))
    back = np.floor(y / step + (draws.random(y.shape) if stochastic else 0.5)) * step * scale
    return float(10 * np.log10((x**2).sum() / ((back - np.abs(x)) ** 2).sum()))


@pytest.fixture(scope="module")
def noise() -> Noise:
    nearest = nvfp4_noise(1, False)
    return {"input": nearest, "weight": nvfp4_noise(16, False), "grad_output": nvfp4_noise(1, True), "plain": nearest}


def of_nvfp4(noise: Noise, asked: NVFP4BlockScaling, gemm: str) -> float:
    known = dict(noise)
    if asked.disable_2d_quantization:
        known["weight"] = known["plain"]
    if asked.disable_stochastic_rounding:
        known["grad_output"] = known["plain"]
    a, b = (known[role] for role in ROLES[gemm])
    return theory(a, b)


@pytest.mark.parametrize(
    "settings", [{}, {"disable_rht": True}, {"disable_stochastic_rounding": True}, {"disable_2d_quantization": True}]
)
def test_nvfp4_has_the_noise_of_its_elements(settings: dict[str, bool], noise: Noise) -> None:
    """Within 0.25 dB: the transform adds bf16's rounding; what else is wrong is 0.5 dB away or more (below)."""
    asked = NVFP4BlockScaling(**settings)
    for gemm in ROLES:
        assert of_a_gemm(asked, gemm) == pytest.approx(of_nvfp4(noise, asked, gemm), abs=0.25), gemm


@pytest.mark.parametrize("square", [False, True])
def test_mxfp8_has_the_noise_of_e4m3(square: bool) -> None:
    for gemm in ROLES:
        assert of_a_gemm(MXFP8BlockScaling(enable_2d_quantization=square), gemm) == pytest.approx(28.5, abs=0.3), gemm
    assert of_a_gemm(MXFP8BlockScaling(fp8_format=Format.HYBRID), "dgrad") == pytest.approx(24.6, abs=0.3)


def test_what_is_wrong_is_outside_of_theory(noise: Noise) -> None:
    right = NVFP4BlockScaling()
    expected = {gemm: of_nvfp4(noise, right, gemm) for gemm in ROLES}
    exact, a, b = operands(right, "wgrad")
    _, _, untransformed = operands(NVFP4BlockScaling(disable_rht=True), "wgrad")

    def product(a: Operand, b: Operand) -> float:
        return sqnr(gemms.forward(a, b, out_dtype=torch.float32), exact)

    assert product(a, b) == pytest.approx(expected["wgrad"], abs=0.25)
    wrong = {
        "transformed on one side": product(a, untransformed),
        "a doubled scale": product(a, b._replace(scale_inv=2 * b.scale_inv)),
        "another block": product(a, b._replace(data=b.data.roll(1, 1))),
    }
    assert all(found < expected["wgrad"] - 5 for found in wrong.values()), wrong
    for settings in ({"disable_stochastic_rounding": True}, {"disable_2d_quantization": True}):
        assert of_a_gemm(NVFP4BlockScaling(**settings), "dgrad") > expected["dgrad"] + 0.5
    assert of_a_gemm(MXFP8BlockScaling(fp8_format=Format.HYBRID), "wgrad") < 28.5 - 3


def test_products_are_those_of_what_was_cast() -> None:
    for asked in (MXFP8BlockScaling(), NVFP4BlockScaling()):
        _, a, b = operands(asked, "fprop")
        scale = 1.0 if a.scale_inv is None else (a.scale_inv * b.scale_inv).item()
        bias = torch.randn(SIZE)
        for dtype in (torch.float32, torch.bfloat16):
            exact = a.data.double() @ b.data.double().t() * scale + bias
            found = asked.gemm(a, b, "fprop", dtype, bias)
            assert found.dtype == dtype
            torch.testing.assert_close(
                found, exact.to(dtype), rtol=2.0**-7 if dtype is torch.bfloat16 else 1e-5, atol=1e-4
            )
    with pytest.raises(ValueError, match="both must be MXFP8's or both NVFP4's"):
        gemms.forward(a, operands(MXFP8BlockScaling(), "fprop")[1], out_dtype=torch.float32)
    with pytest.raises(ValueError, match="K is 512 in a and 16 in b"):
        gemms.forward(a, b._replace(data=b.data[:, :16]), out_dtype=torch.float32)


def gradients(asked: Recipe, seed: int, run: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> list[Tensor]:
    torch.manual_seed(0)
    layer, x = te.Linear(48, 40, device="cpu"), torch.randn(50, 48, requires_grad=True)
    torch.manual_seed(seed)
    with te.autocast(recipe=asked):
        y = run(layer)(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in (x, layer.weight, layer.bias) if p.grad is not None)]


@pytest.mark.parametrize("asked", [MXFP8BlockScaling(), NVFP4BlockScaling()], ids=["mxfp8", "nvfp4"])
def test_a_step_follows_from_its_seed_compiled_or_not(asked: Recipe) -> None:
    first, again, other = (gradients(asked, seed) for seed in (1, 1, 2))
    compiled = gradients(asked, 1, lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True))  # type: ignore[arg-type,return-value]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, compiled, strict=True))
    assert torch.equal(first[0], other[0])  # a forward pass draws nothing
    assert torch.equal(first[2], other[2]) == (not asked.nvfp4())
    exact = gradients(recipe.DelayedScaling(), 1)
    assert not torch.equal(first[0], exact[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MXFP8BlockScaling(fp8_format=Format.E5M2), "E5M2 has too few mantissa bits"),
        (lambda: MXFP8BlockScaling(margin=1), "margin=1 is not possible: MXFP8 has none"),
        (lambda: NVFP4BlockScaling(fp8_format=Format.HYBRID), "HYBRID.*is not possible: Format.E4M3$"),
        (lambda: NVFP4BlockScaling(row_scaled_activation=True), "row_scaled_activation=True is not possible"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="all"), "nvfp4_4over6='all' is not possible: 'none'"),
        (lambda: NVFP4BlockScaling(fp8_dpa=True), "fp8_dpa=True is not possible"),
    ],
)
def test_impossible_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_transformer_engine_s_questions_say_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("MXFP8", "NVFP4"):
        available = getattr(te, f"is_{name.lower()}_available")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        assert available(return_reason=True) == (
            False,
            "a tensor core with block scales needs compute capability 10.0, this GPU has 9.0; "
            f"te.recipe.{name}BlockScaling() has its numbers on any device, by bf16 GEMMs",
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(block_scaled, "supported", lambda device: device.index == 0)  # its products are right
        assert available(return_reason=True) == (True, "")


@pytest.mark.parametrize("asked", [MXFP8BlockScaling(), NVFP4BlockScaling()], ids=["mxfp8", "nvfp4"])
def test_a_recipe_multiplies_in_half_precision_where_no_tensor_core_has_its_format(asked: Recipe) -> None:
    where = [("cpu", None), ("cuda", (9, 0)), ("cuda", (10, 0)), ("cuda", (12, 0))]
    assert [asked.by_half_gemms(*one) for one in where] == [True, True, False, False]
    always = dataclasses.replace(asked, emulate=True)
    assert all(always.by_half_gemms(*one) for one in where)
    assert not any(recipe.DelayedScaling().by_half_gemms(*one) for one in where)


BLOCKS = [f"transformer.h.{block}.{name}" for block in range(12) for name in ("attn.proj", "mlp.fc")] + [
    "experts.0",
    "head",
]


@pytest.mark.parametrize(("share", "kept"), [(0.0, set()), (1 / 6, {10, 11}), (0.01, {11}), (1.0, set(range(12)))])
def test_a_recipe_keeps_whole_blocks_from_the_last_and_the_head(share: float, kept: set[int]) -> None:
    found = NVFP4BlockScaling(bf16_last=share).keeps(BLOCKS)
    expected = {name for name in BLOCKS if name.split(".")[0] == "transformer" and int(name.split(".")[2]) in kept}
    assert found == expected | ({"head"} if kept else set())


def test_the_first_blocks_are_kept_without_the_head_and_beside_the_last() -> None:
    first = recipe.RowwiseScaling(bf16_first=1 / 6).keeps(BLOCKS)
    assert {name.split(".")[2] for name in first} == {"0", "1"}
    both = recipe.RowwiseScaling(bf16_first=1 / 6, bf16_last=1 / 6).keeps(BLOCKS)
    assert both == first | recipe.RowwiseScaling(bf16_last=1 / 6).keeps(BLOCKS)
    assert "head" in both - first
    assert recipe.RowwiseScaling(bf16_first=1.0, bf16_last=1.0).keeps(BLOCKS) == set(BLOCKS) - {"experts.0"}
    with pytest.raises(ValueError, match=r"bf16_first=0\.5: the model's layers are in no numbered blocks"):
        recipe.RowwiseScaling(bf16_first=0.5).keeps(["up", "down"])
    with pytest.raises(ValueError, match="bf16_first=-1 is not possible: a share of the blocks, 0 to 1"):
        recipe.RowwiseScaling(bf16_first=-1)


def test_a_share_of_the_blocks_is_that_many_whatever_floats_make_of_it() -> None:
    for blocks in (6, 25, 100):
        names = [f"h.{number}" for number in range(blocks)]
        for kept in range(1, blocks + 1):
            assert len(NVFP4BlockScaling(bf16_last=kept / blocks).keeps(names)) == kept
    assert len(NVFP4BlockScaling(bf16_last=0.07).keeps([f"h.{number}" for number in range(100)])) == 7
    assert len(NVFP4BlockScaling(bf16_last=1e-12).keeps(["h.0", "h.1"])) == 1


def test_a_share_that_no_blocks_have_is_refused() -> None:
    with pytest.raises(ValueError, match="in no numbered blocks; leave it at 0"):
        NVFP4BlockScaling(bf16_last=0.5).keeps(["up", "down"])
    with pytest.raises(ValueError, match="bf16_last=2 is not possible: a share of the blocks, 0 to 1"):
        NVFP4BlockScaling(bf16_last=2)
    for name in recipe.names():
        with pytest.raises(ValueError, match="bf16_last=5 is not possible: a share of the blocks, 0 to 1"):
            dataclasses.replace(recipe.load(name), bf16_last=5)


def test_convert_and_models_leave_the_last_blocks_in_bf16() -> None:
    asked = NVFP4BlockScaling(bf16_last=0.5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)) for _ in range(3)))
    report = te.convert(model, asked)
    assert [entry.name for entry in report.kept] == ["1.0", "2.0"]
    assert {entry.reason for entry in report.kept} == {"kept by the recipe"}
    assert isinstance(model[0][0], te.Linear)
    config = configs()["tiny"]
    for made, fp8 in ((asked, 4), (NVFP4BlockScaling(), 8), (NVFP4BlockScaling(bf16_first=0.5, bf16_last=0.5), 0)):
        model = decoder.build(config, recipe=made)
        assert sum(isinstance(module, te.Linear) for module in model.modules()) == fp8
    blocks = decoder.build(config, recipe=NVFP4BlockScaling(bf16_first=0.5)).transformer.h
    assert [isinstance(block.mlp.c_fc, te.Linear) for block in blocks] == [False, True]
