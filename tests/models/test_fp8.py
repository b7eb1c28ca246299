"""autocast, numerics, and what users do with both."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_cases import RECIPES, model, train
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import te_bench.models as te
from te_bench.models import fp8, recipe

# ---- autocast


def test_by_its_older_name() -> None:
    asked = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)
    assert not te.is_fp8_enabled()
    with te.fp8_autocast(enabled=True, fp8_recipe=asked):
        assert te.is_fp8_enabled()
        assert fp8.current.recipe == asked
    with te.fp8_autocast(enabled=False, fp8_recipe=asked):
        assert not te.is_fp8_enabled()
    assert not te.is_fp8_enabled()


def test_the_default_recipe_is_delayed_scaling() -> None:
    with te.autocast():
        assert fp8.current.recipe == recipe.DelayedScaling()


def test_as_a_decorator_and_again() -> None:
    context = te.autocast(recipe=recipe.Float8CurrentScaling())

    @context
    def inside() -> bool:
        return te.is_fp8_enabled()

    assert inside()
    assert inside()
    with context, context:
        assert te.is_fp8_enabled()
    assert not te.is_fp8_enabled()


def test_leaving_ends_all_that_are_open_and_none_takes_a_step() -> None:
    (layer, x), outer, inner = a_linear(), te.autocast(), te.autocast()
    with outer:
        with inner:
            layer(x)
            fp8.reset()
            with te.autocast(enabled=False):
                pass
        assert not te.is_fp8_enabled()
    assert not te.is_fp8_enabled()
    assert te.numerics(layer)[""]["input"]["scale"] == 1.0
    steps(layer, x, 1)
    assert te.numerics(layer)[""]["input"]["scale"] != 1.0


def test_the_innermost_counts() -> None:
    layer, x = te.Linear(32, 16, bias=False), torch.randn(8, 32)
    with te.autocast(recipe=RECIPES["current"]):
        per_tensor = layer(x)
        with te.autocast(recipe=RECIPES["row"]):
            per_row = layer(x)
        with te.autocast(enabled=False):
            exact = layer(x)
        assert torch.equal(layer(x), per_tensor)
    assert torch.equal(exact, layer(x))
    assert not torch.equal(per_row, per_tensor)
    assert not torch.equal(exact, per_tensor)


@pytest.mark.parametrize("value", ["fp8", 3, recipe.DelayedScaling])
def test_what_is_no_recipe(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"is no recipe: choose one of te_bench.models.recipe, e.g. DelayedScaling\(\)"
    ):
        te.autocast(recipe=value)


def test_a_gpu_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(ValueError, match=r"compute capability 8.9, this GPU has 8.0; DelayedScaling\(emulate=True\)"):
        te.autocast()
    te.autocast(enabled=False)
    te.autocast(recipe=recipe.DelayedScaling(emulate=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    with pytest.raises(ValueError, match="Float8BlockScaling"):
        te.autocast(recipe=recipe.Float8BlockScaling())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    te.autocast(recipe=recipe.Float8BlockScaling())


# ---- numerics


def test_numerics_count_what_fp8_loses() -> None:
    layer = te.Linear(16, 16, init_method=lambda w: nn.init.constant_(w, 0.5))
    x = torch.ones(4, 16)
    x[0, 0], x[0, 1], x[0, 2], x[1, 0] = 1e9, 1e-9, torch.inf, torch.nan
    asked = recipe.DelayedScaling(amax_history_len=2)
    with te.record_numerics():
        with te.autocast(recipe=asked):  # scale 1
            layer(x).nan_to_num(0, 0, 0).sum().backward()
        figures = te.numerics(nn.Sequential(layer))["0"]
        counts = ("saturated", "underflowed", "nonfinite")
        assert [figures["input"][key] for key in counts] == [1, 1, 2]
        assert [figures["weight"][key] for key in counts] == [0, 0, 0]
        assert figures["input"]["nonfinite_amax"] == 1
        assert figures["weight"] == {"scale": 896.0, "amax": 0.5, "nonfinite_amax": 0, **dict.fromkeys(counts, 0)}
        with te.autocast(recipe=asked):
            layer(x)
    assert te.numerics(layer)[""]["input"]["nonfinite"] == 4  # they add up
    with te.autocast(recipe=asked):
        layer(x)
    assert te.numerics(layer)[""]["input"]["nonfinite"] == 4  # and stop outside


@pytest.mark.parametrize("name", ["delayed", "current", "row", "block"])
def test_numerics_know_every_tensor(name: str) -> None:
    layers = model()
    assert te.numerics(layers) == {}
    with te.record_numerics():
        train(layers, layers, RECIPES[name], 1)
    found = te.numerics(layers)
    assert set(found) == {"0", "1", "2"}
    roles = ("input", "weight", "grad_output")
    assert set(found["0"]) == {f"fc{i}.{role}" for i in (1, 2) for role in roles}
    assert set(found["2"]) == set(roles)
    for tensors in found.values():
        for figures in tensors.values():
            assert {"saturated", "underflowed", "nonfinite"} <= set(figures)
            assert ("scale" in figures) == (name == "delayed")


def test_small_gradients_underflow_at_scale_one_and_are_counted() -> None:
    layer = te.Linear(16, 16)
    with te.record_numerics():
        for expected in (64, 64, 64):  # step 1 casts by scale 1, the steps after it by the scale of these gradients
            before = te.numerics(layer).get("", {}).get("grad_output", {}).get("underflowed", 0)
            with te.autocast(recipe=recipe.DelayedScaling()):
                y = layer(torch.randn(4, 16))
            y.backward(torch.full((4, 16), 1e-9))
            now = te.numerics(layer)[""]["grad_output"]["underflowed"]
            assert now - before == (expected if before == 0 else 0)


def test_a_state_belongs_to_its_module() -> None:
    """What autocast updates keeps no module and no state alive, and a copy has a state of its own."""
    layer = te.Linear(16, 16)
    with te.autocast():
        layer(torch.ones(4, 16))
    twin = copy.deepcopy(layer)
    with te.autocast():
        twin(torch.full((4, 16), 2.0))
    assert [te.numerics(one)[""]["input"]["scale"] for one in (layer, twin)] == [448.0, 224.0]
    state = weakref.ref(layer.written()[0])
    del layer
    assert state() is None


# What a user does that a test of one recipe in one loop does not.


def a_linear() -> tuple[te.Linear, Tensor]:
    torch.manual_seed(0)
    return te.Linear(32, 32, device="cpu"), torch.randn(16, 32) * 1e-4


def steps(layer: nn.Module, x: Tensor, number: int, **asked: Any) -> Tensor:
    for _ in range(number):
        with te.autocast(recipe=recipe.DelayedScaling(**asked)):
            y = layer(x)
        y.sum().backward()
    return y.detach()


def test_another_setting_of_delayed_scaling_goes_on_from_the_scales_there_are() -> None:
    layer, x = a_linear()
    y = steps(layer, x, 4, amax_history_len=8)
    with torch.no_grad(), te.autocast(recipe=recipe.DelayedScaling(amax_history_len=2)):
        assert torch.equal(layer(x), y)
    scale = te.numerics(layer)[""]["grad_output"]["scale"]
    with torch.no_grad(), te.autocast(recipe=recipe.DelayedScaling(fp8_format=recipe.Format.E4M3)):
        layer(x)
    assert te.numerics(layer)[""]["grad_output"]["scale"] == scale * 448 / 57344


def test_a_recipe_with_a_function_made_anew_in_every_step_still_scales_and_is_not_kept_for_ever() -> None:
    layer, x = a_linear()
    for _ in range(70):
        steps(layer, x, 1, amax_compute_algo=lambda history: history.amax(0))
    assert te.numerics(layer)[""]["input"]["scale"] == pytest.approx(448 / x.abs().max().item(), rel=1e-6)
    assert te.numerics(layer)[""]["grad_output"]["scale"] != 1.0
    assert len(fp8._interned) <= fp8.INTERNED


def _raises(history: Tensor) -> Tensor:
    raise RuntimeError("the user's own function")


@pytest.mark.parametrize(
    "fail",
    [
        lambda layer, x: steps(layer, x, 1, amax_compute_algo=_raises),
        lambda layer, x: steps(layer, x[:, :5], 1),
    ],
)
def test_a_pass_that_failed_leaves_other_modules_alone(fail: Callable[[nn.Module, Tensor], None]) -> None:
    failed, x = a_linear()
    with pytest.raises((RuntimeError, ValueError)):
        fail(failed, x)
    layer, x = a_linear()
    steps(layer, x, 2)  # `failed` lives, and so does its state
    assert te.numerics(layer)[""]["input"]["scale"] == pytest.approx(448 / x.abs().max().item(), rel=1e-6)
    assert te.numerics(layer)[""]["grad_output"]["scale"] == 57344.0
    del failed


def _leave_meta(layer: nn.Module) -> None:
    layer.reset_parameters()  # type: ignore[operator]


@pytest.mark.parametrize("leave", [_leave_meta, lambda layer: layer.to_empty(device="cpu")])
def test_scales_begin_afresh_after_a_pass_on_the_meta_device(leave: Callable[[nn.Module], Any]) -> None:
    layer, x = te.Linear(32, 32, device="meta"), torch.ones(16, 32)
    steps(layer, x.to("meta"), 2)
    leave(layer)
    assert not any(name.startswith("fp8_") for name in layer.state_dict())
    with torch.no_grad():
        layer.weight.fill_(0.5)
    steps(layer, x, 1)
    assert te.numerics(layer)[""]["input"]["scale"] == 448.0


def test_a_pass_under_fake_tensor_mode_changes_no_later_one() -> None:
    layer, x = a_linear()
    steps(layer, x, 2)
    known = layer.state_dict()
    copied, _ = a_linear()
    copied.load_state_dict(known)
    with FakeTensorMode(allow_non_fake_inputs=True):
        steps(copied, torch.ones(16, 32), 2)
    copied.zero_grad()
    with torch.no_grad(), te.autocast(recipe=recipe.DelayedScaling()):
        y = copied(x)
        assert torch.equal(y, layer(x))
    assert not isinstance(y, FakeTensor)
    assert torch.equal(copied.state_dict()["fp8_amax_history_fwd"], known["fp8_amax_history_fwd"])
    assert torch.equal(steps(copied, x, 2), steps(layer, x, 2))


def test_every_recipe_of_a_region_takes_a_step() -> None:
    (first, x), (second, _) = a_linear(), a_linear()
    with te.autocast(recipe=recipe.DelayedScaling()):
        first(x)
        with te.autocast(recipe=recipe.DelayedScaling(margin=1)):
            second(x)
    assert te.numerics(first)[""]["input"]["scale"] == pytest.approx(448 / x.abs().max().item(), rel=1e-6)
    assert te.numerics(second)[""]["input"]["scale"] == pytest.approx(224 / x.abs().max().item(), rel=1e-6)


def test_a_second_derivative_is_refused() -> None:
    for layer in (
        te.Linear(32, 32, device="cpu"),
        te.LayerNormLinear(32, 32, device="cpu"),
        te.LayerNormMLP(32, 32, device="cpu"),
    ):
        x = torch.randn(16, 32, requires_grad=True)
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            y = layer(x)
        for scalar in (y.square().sum(), y.sum()):
            (dx,) = torch.autograd.grad(scalar, x, create_graph=True, retain_graph=True)
            with pytest.raises(ValueError, match="second derivatives, which te-bench's kernels do not have"):
                dx.square().sum().backward()


def test_a_model_that_first_ran_in_inference_mode_trains() -> None:
    layer, x = a_linear()
    with torch.inference_mode(), te.autocast(recipe=recipe.DelayedScaling()), te.record_numerics():
        layer(x)
    steps(layer, x, 2)
    assert te.numerics(layer)[""]["input"]["scale"] == pytest.approx(448 / x.abs().max().item(), rel=1e-6)


def test_an_outer_autocast_that_is_off_does_not_keep_the_inner_one_from_its_steps() -> None:
    layer, x = a_linear()
    for _ in range(2):
        with te.autocast(enabled=False), te.autocast(recipe=recipe.DelayedScaling()):
            y = layer(x)
        y.sum().backward()
    assert te.numerics(layer)[""]["input"]["scale"] == pytest.approx(448 / x.abs().max().item(), rel=1e-6)


def test_a_checkpoint_of_another_format_is_refused_before_anything_is_loaded() -> None:
    layer, x = a_linear()
    steps(layer, x, 2, fp8_format=recipe.Format.E4M3, amax_history_len=4)
    other, _ = a_linear()
    steps(other, x, 2, amax_history_len=4)
    before = other.state_dict()["fp8_scale_fwd"].clone()
    with pytest.raises(ValueError, match="another fp8_format"):
        other.load_state_dict(layer.state_dict())
    assert torch.equal(other.state_dict()["fp8_scale_fwd"], before)
    with pytest.raises(ValueError, match="not a tensor"):
        other.load_state_dict({**other.state_dict(), "fp8_scale_fwd": 3})


def test_an_encoder_layer_has_no_use_for_an_encoder_output() -> None:
    layer = te.TransformerLayer(32, 64, 2, device="cpu", qk_norm_type="RMSNorm", softmax_type="vanilla")
    x = torch.randn(4, 2, 32)
    assert layer(x, checkpoint_core_attention=True).shape == x.shape
    with pytest.raises(ValueError, match="decoder"):
        layer(x, encoder_output=x)


@pytest.mark.parametrize("margin", [True, 2000, 10**400, float("nan"), "1"])
def test_an_impossible_margin(margin: Any) -> None:
    with pytest.raises(ValueError, match=r"margin=.* is not possible: a number"):
        recipe.DelayedScaling(margin=margin)


@pytest.mark.parametrize("kind", [te.LayerNorm, te.RMSNorm])
def test_what_a_norm_cannot_take_it_says(kind: type[nn.Module]) -> None:
    layer = kind(32, device="cpu")
    with pytest.raises(ValueError, match=r"got torch\.int64"):
        layer(torch.ones(4, 32, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"got torch\.float8_e4m3fn"):
        layer(torch.ones(4, 32).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="on meta"):
        layer(torch.ones(4, 32, device="meta"))


@pytest.mark.parametrize("asked", [recipe.DelayedScaling(amax_history_len=5), recipe.Float8CurrentScaling()])
def test_forgetting_other_recipes_keeps_scales_and_kept_weights(asked: recipe.Recipe) -> None:
    layer, x = a_linear()
    with te.autocast(recipe=asked):
        layer(x, is_first_microbatch=True)
    scales = [tensor.data_ptr() for tensor in layer.written()]
    for length in range(100, 100 + 2 * fp8.INTERNED):
        te.autocast(recipe=recipe.DelayedScaling(amax_history_len=length))
    with te.autocast(recipe=copy.deepcopy(asked)):
        layer(x, is_first_microbatch=False)
    assert [tensor.data_ptr() for tensor in layer.written()] == scales
