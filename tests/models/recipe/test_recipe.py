"""One contract over all recipes, their formats, and the settings that they refuse."""

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from te_bench.kernels.gemm.backends import reference
from te_bench.models import faults, recipe
from te_bench.models.recipe import Format, Recipe, Slot

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROLES = ("input", "weight", "grad_output")
GEMMS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}


def slot(x: Tensor, asked: Recipe, role: str) -> Slot:
    """Delayed scaling's scale for these data; the others take no notice."""
    return Slot(scale=torch.finfo(asked.dtype(role)).max / x.abs().amax(), amax=torch.zeros(()))


IN_FP8 = [name for name in recipe.names() if not recipe.load(name).block_formats]


def test_each_runs_on_a_cpu_and_has_fp8_attention_where_its_name_says_so() -> None:
    for name in recipe.names():
        assert recipe.load(name).unsupported("cpu", None) is None
        assert recipe.load(name).fp8_dpa == name.endswith("_dpa"), "off unless asked for"
    assert recipe.DelayedScaling(fp8_dpa=True).fp8_dpa


@pytest.mark.parametrize("name", [name for name in recipe.names() if not recipe.load(name).nvfp4()])
def test_quantising_and_multiplying_is_nearly_multiplying(name: str) -> None:
    asked = recipe.load(name)
    generator = torch.Generator().manual_seed(0)
    for gemm, (left, right) in GEMMS.items():
        # dgrad contracts the weight's rows, wgrad the rows of both: the operands' other layouts.
        a, b = torch.randn(64, 256, generator=generator), torch.randn(32, 256, generator=generator)
        exact = a.double() @ b.double().t()
        first = a if gemm != "wgrad" else a.t().contiguous()
        second = b if gemm == "fprop" else b.t().contiguous()
        qa = asked.quantize(first, left, slot(a, asked, left), rowwise=True, columnwise=True)
        qb = asked.quantize(second, right, slot(b, asked, right), rowwise=True, columnwise=True)
        ours_a = qa.by_rows() if gemm != "wgrad" else qa.by_columns()
        ours_b = qb.by_rows() if gemm == "fprop" else qb.by_columns()
        out = asked.gemm(ours_a, ours_b, gemm, torch.float32)
        noise = 20 * torch.log10(exact.norm() / (out - exact).norm()).item()
        if gemm == "wgrad" and asked.bf16_wgrad:
            assert noise > 120, "float32's own"
            continue
        theory = 24.6 if E5M2 in (asked.dtype(left), asked.dtype(right)) else 28.5
        assert noise == pytest.approx(theory, abs=1.0), gemm


@pytest.mark.parametrize(
    ("asked", "formats"),
    [
        (recipe.DelayedScaling(), [E4M3, E4M3, E5M2]),
        (recipe.DelayedScaling(fp8_format=Format.E4M3), [E4M3, E4M3, E4M3]),
        (recipe.Float8CurrentScaling(), [E4M3, E4M3, E5M2]),
        (recipe.Float8CurrentScaling(fp8_format=Format.E4M3), [E4M3, E4M3, E4M3]),
        (recipe.RowwiseScaling(), [E4M3, E4M3, E4M3]),
        (recipe.RowwiseScaling(fp8_format=Format.HYBRID), [E4M3, E4M3, E5M2]),
        (recipe.Float8BlockScaling(), [E4M3, E4M3, E4M3]),
    ],
)
def test_formats_by_role(asked: Recipe, formats: list[torch.dtype]) -> None:
    x = torch.ones(16, 16)
    made = [asked.quantize(x, role, slot(x, asked, role), rowwise=True, columnwise=True) for role in ROLES]
    assert [q.data.dtype for q in made] == formats
    assert [q.data_t.dtype for q in made] == formats
    assert [q.layout.format for q in made] == formats


@pytest.mark.parametrize("fp8_format", list(Format))
@pytest.mark.parametrize("role", ROLES)
def test_a_cast_by_a_given_scale_is_the_recipes_own(fp8_format: Format, role: str) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    layouts = {"rowwise": True, "columnwise": False}
    asked = recipe.Float8CurrentScaling(Format.HYBRID if fp8_format is Format.E5M2 else fp8_format)
    own = asked.quantize(x, role, Slot(), **layouts)
    given = asked.by_given_scale()
    assert given is not None
    made = given.quantize(x, role, Slot(scale=1 / own.scale_inv), **layouts)
    assert torch.equal(made.data.view(torch.uint8), own.data.view(torch.uint8))


def test_what_no_given_scale_can_cast_says_so() -> None:
    delayed = recipe.DelayedScaling()
    assert delayed.by_given_scale() is delayed
    for name in ("rowwise_scaling", "float8_block_scaling"):
        assert recipe.load(name).by_given_scale() is None
    for made in (recipe.Float8CurrentScaling, recipe.RowwiseScaling):
        assert made(bf16_wgrad=True).by_given_scale() is None, "wgrad reads what no scale made"
    for fault in ("e5m2_forward", "doubled_scale", "flushed_gradients"):
        assert faults.load(fault)(recipe.Float8CurrentScaling()).by_given_scale() is None, "it casts in its own way"


@pytest.mark.parametrize("name", recipe.names())
@pytest.mark.parametrize("role", ROLES)
def test_the_sum_over_rows_is_added(name: str, role: str) -> None:
    asked, x = recipe.load(name), torch.randn(40, 24)
    total = torch.ones(24)
    asked.quantize(x, role, slot(x, asked, role), rowwise=True, columnwise=False, column_sum=total)
    assert torch.allclose(total, 1 + x.sum(0), atol=1e-5)


@pytest.mark.parametrize("name", recipe.names())
def test_bias_gradients_are_summed_in_float32(name: str) -> None:
    """4095 ones in bf16, whose next number is 4096."""
    asked, dy = recipe.load(name), torch.ones(4095, 16, dtype=torch.bfloat16)
    total = torch.zeros(16)
    asked.quantize(
        dy, "grad_output", slot(dy.float(), asked, "grad_output"), rowwise=True, columnwise=True, column_sum=total
    )
    assert total.tolist() == [4095.0] * 16


@pytest.mark.parametrize("name", [name for name in IN_FP8 if not recipe.load(name).bf16_wgrad])
def test_fast_accumulation_is_for_fprop_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def spy(*operands: object, fast_accum: bool, **more: object) -> None:
        seen[len(seen)] = fast_accum

    monkeypatch.setattr(reference, "forward", spy)
    asked, x = recipe.load(name), torch.ones(16, 16)
    q = asked.quantize(x, "input", slot(x, asked, "input"), rowwise=True, columnwise=False)
    for gemm in GEMMS:
        asked.gemm(q.by_rows(), q.by_rows(), gemm, torch.float32)
    assert list(seen.values()) == [True, False, False]


@pytest.mark.parametrize("kind", [recipe.Float8CurrentScaling, recipe.RowwiseScaling])
def test_a_weight_gradient_in_bf16_is_never_that_of_an_fp8_copy(kind: Any) -> None:
    """A subclass that casts in its own way is told, and not multiplied in FP8 under the name of bf16."""
    asked, x = kind(bf16_wgrad=True), torch.randn(48, 32).bfloat16()
    g = torch.randn(48, 16).bfloat16()
    q, dy = (
        asked.quantize(t, role, Slot(), rowwise=True, columnwise=True) for t, role in ((x, "input"), (g, "grad_output"))
    )
    for made, t, role in ((q, x, "input"), (dy, g, "grad_output")):
        base = kind().quantize(t, role, Slot(), rowwise=True, columnwise=False)
        assert torch.equal(made.data.view(torch.uint8), base.data.view(torch.uint8))
        assert torch.equal(made.data_t, t.t())
    assert torch.equal(asked.gemm(dy.by_columns(), q.by_columns(), "wgrad", torch.float32), (g.t() @ x).float())
    weight = asked.quantize(x, "weight", Slot(), rowwise=True, columnwise=True)
    assert weight.data_t.dtype.itemsize == 1  # dgrad reads it

    class Own(kind):  # type: ignore[misc]
        def quantize(self, *arguments: Any, **layouts: Any) -> Any:
            return kind().quantize(*arguments, **layouts)

    own = Own(bf16_wgrad=True).quantize(x, "input", Slot(), rowwise=True, columnwise=True)
    with pytest.raises(ValueError, match="bf16_wgrad=True, but its quantize casts what wgrad reads"):
        Own(bf16_wgrad=True).gemm(dy.by_columns(), own.by_columns(), "wgrad", torch.float32)


def test_what_a_gpu_must_have() -> None:
    for name in IN_FP8:
        asked = recipe.load(name)
        assert asked.unsupported("cuda", (9, 0)) is None
        assert (asked.unsupported("cuda", (8, 9)) is None) == (name != "float8_block_scaling")
        assert "this GPU has 8.0; " in str(asked.unsupported("cuda", (8, 0)))
        assert "(emulate=True) computes the same numbers" in str(asked.unsupported("cuda", (8, 0)))
        assert dataclasses.replace(asked, emulate=True).unsupported("cuda", (7, 5)) is None
        assert asked.unsupported("cuda", (10, 0)) is None  # block scales by Triton
    for name in set(recipe.names()) - set(IN_FP8):  # emulated by bf16 GEMMs
        assert recipe.load(name).unsupported("cuda", (8, 0)) is None
        assert "bf16 needs compute capability 8.0, this GPU has 7.5; " in str(
            recipe.load(name).unsupported("cuda", (7, 5))
        )
    assert "9.x only, not 8.9, and Triton's TMA needs" in str(recipe.Float8BlockScaling().unsupported("cuda", (8, 9)))


def test_equal_settings_are_equal_recipes() -> None:
    assert recipe.DelayedScaling(margin=1) == recipe.DelayedScaling(1)
    assert hash(recipe.RowwiseScaling()) == hash(recipe.RowwiseScaling())
    assert recipe.Float8CurrentScaling() != recipe.Float8CurrentScaling(power_of_two=True)
    for name in recipe.names():
        assert pickle.loads(pickle.dumps(recipe.load(name))) == recipe.load(name)


def test_arguments_stand_in_transformer_engines_order() -> None:
    asked = recipe.DelayedScaling(2, Format.E4M3, 16, "most_recent")
    assert (asked.margin, asked.fp8_format, asked.amax_history_len, asked.amax_compute_algo) == (
        2,
        Format.E4M3,
        16,
        "most_recent",
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: recipe.DelayedScaling(fp8_format=Format.E5M2),
            "E5M2 has too few mantissa bits for the forward pass; ",
        ),
        (lambda: recipe.Float8CurrentScaling(fp8_format=Format.E5M2), "Format.HYBRID or Format.E4M3"),
        (lambda: recipe.RowwiseScaling(fp8_format=Format.E5M2), "RowwiseScaling: fp8_format=<Format.E5M2"),
        (lambda: recipe.Float8BlockScaling(fp8_format=Format.HYBRID), "HYBRID.*is not possible: Format.E4M3$"),
        (lambda: recipe.DelayedScaling(fp8_format="HYBRID"), "fp8_format='HYBRID' is not possible: Format.HYBRID or"),
        (
            lambda: recipe.DelayedScaling(amax_history_len=0),
            "amax_history_len=0 is not possible: a whole number from 1",
        ),
        (lambda: recipe.DelayedScaling(amax_history_len=2.5), "amax_history_len=2.5 is not possible"),
        (lambda: recipe.DelayedScaling(amax_history_len=True), "amax_history_len=True is not possible"),
        (
            lambda: recipe.DelayedScaling(amax_compute_algo="mean"),
            "'mean' is not possible: one of max, most_recent, or a",
        ),
        (
            lambda: recipe.DelayedScaling(scaling_factor_compute_algo="half"),
            "'half' is not possible: None or a function",
        ),
        (lambda: recipe.DelayedScaling(fp8_mha=True), "fp8_mha=True is not possible"),
    ],
)
def test_impossible_settings(make: Callable[[], Recipe], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_no_short_cut_goes_past_an_overridden_quantize() -> None:
    """A pair's launch and a fused kernel's cast are not asked of a recipe that has its own quantize and no others."""

    class Own(recipe.DelayedScaling):
        def quantize(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("asked")

    class Inheriting(Own):
        pass

    class Mixin:  # no Recipe itself
        quantize = Own.quantize

    class Mixed(Mixin, recipe.DelayedScaling):
        pass

    given = Slot(scale=torch.ones(()))
    for kind in (Own, Inheriting, Mixed):
        assert kind().epilogue("input", given) is None
        with pytest.raises(AssertionError, match="asked"):
            kind().quantize_pair(torch.ones(2, 2), given, torch.ones(2, 2), given, x_columnwise=True, w_columnwise=True)
    assert recipe.DelayedScaling().epilogue("input", given) is not None
