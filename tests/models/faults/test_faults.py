"""Each planted fault is wrong in the way it says and in no other, in both passes, at every granularity, and compiled."""

import copy
import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from whole_recipes import WHOLE

from te_bench import models as te
from te_bench.kernels.quantize import SATURATED, UNDERFLOWED, Quantized
from te_bench.kernels.quantize.backends.reference import dequantize, spread
from te_bench.models import faults
from te_bench.models import recipe as recipes
from te_bench.models.faults.flushed_gradients import THRESHOLD
from te_bench.models.faults.nan_at_depth import DEPTH
from te_bench.models.faults.poisoned_token import POWER
from te_bench.models.faults.short_history import SPIKE
from te_bench.models.modules.linear import Linear
from te_bench.models.recipe import DelayedScaling, Float8CurrentScaling, Recipe, Slot
from te_bench.reports.convergence.equivalence import Verdict, compare

ROLES = ("input", "weight", "grad_output")
STATELESS = [name for name in WHOLE if not recipes.load(name).delayed()]
KEPT = ("frozen_scale", "nan_at_depth", "short_history")  # those that recipes keep from step to step
#: Every fault with every recipe that it can be planted into.
PLANTED = [(fault, name) for fault in faults.names() for name in WHOLE]
PLANTED = [(fault, name) for fault, name in PLANTED if fault not in KEPT or name == "delayed_scaling"]
OF_SCALES = ("doubled_scale", "e5m2_forward")
IN_FP8 = [name for name in WHOLE if not recipes.load(name).block_formats]
PLANTED = [(fault, name) for fault, name in PLANTED if fault not in OF_SCALES or name in IN_FP8]


def a_tensor(rows: int = 96, columns: int = 160, seed: int = 0) -> Tensor:
    """Rows of very different sizes, so that scales per row and per block differ."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 1, rows)[:, None]


def slot_of(recipe: Recipe, counts: Tensor | None = None) -> Slot:
    if isinstance(recipe, DelayedScaling):
        return Slot(torch.tensor(12.0), torch.tensor(0.0), counts)
    return Slot(counts=counts)


def cast(recipe: Recipe, x: Tensor, role: str, counts: Tensor | None = None) -> Quantized:
    torch.manual_seed(0)  # by which gradients may be rounded
    return recipe.quantize(x, role, slot_of(recipe, counts), rowwise=True, columnwise=True)


def same(a: Quantized, b: Quantized) -> bool:
    pairs = [(x, y) for x, y in zip(a[:4], b[:4], strict=True) if x is not None or y is not None]
    return a.layout == b.layout and all(torch.equal(x.float(), y.float()) and x.dtype == y.dtype for x, y in pairs)


@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_a_planted_recipe_is_its_own_and_keeps_the_settings(fault: str, name: str) -> None:
    right = dataclasses.replace(recipes.load(name), emulate=True)
    wrong = faults.load(fault)(right)
    assert wrong != right
    assert isinstance(wrong, type(right))
    assert wrong == faults.load(fault)(right)  # or every autocast would begin with fresh scales
    assert hash(wrong) == hash(faults.load(fault)(right))
    assert all(getattr(wrong, f.name) == getattr(right, f.name) for f in dataclasses.fields(right))
    assert copy.deepcopy(wrong) == wrong


@pytest.mark.parametrize("name", IN_FP8)
def test_e5m2_forward_is_e5m2_in_the_forward_pass_alone(name: str) -> None:
    right, wrong = recipes.load(name), faults.load("e5m2_forward")(recipes.load(name))
    for role in ("input", "weight"):
        q = cast(wrong, a_tensor(), role)
        assert q.data.dtype == q.data_t.dtype == torch.float8_e5m2
        assert cast(right, a_tensor(), role).data.dtype == torch.float8_e4m3fn
    assert same(cast(wrong, a_tensor(), "grad_output"), cast(right, a_tensor(), "grad_output"))


@pytest.mark.parametrize("name", ["rowwise_scaling", "float8_block_scaling"])
@pytest.mark.parametrize("role", ROLES)
def test_a_doubled_scale_is_exactly_twice_the_right_one(name: str, role: str) -> None:
    """Scales of these two are powers of two: doubling is exact, and the data follow bit for bit."""
    recipe, x, counts = recipes.load(name), a_tensor(), torch.zeros(3, dtype=torch.int64)
    right, wrong = cast(recipe, x, role), cast(faults.load("doubled_scale")(recipe), x, role, counts)
    for operand, right_inverse, values in (
        (wrong.by_rows(), right.scale_inv, x),
        (wrong.by_columns(), right.scale_inv_t, x.t().contiguous()),
    ):
        data = operand.data
        assert torch.equal(operand.scale_inv, right_inverse / 2)
        limit = torch.finfo(data.dtype).max
        scaled = values / spread(operand)
        assert torch.equal(data.float(), scaled.clamp(-limit, limit).to(data.dtype).float())
        assert data.is_contiguous()
    assert counts[SATURATED] > 0.001 * x.numel()


@pytest.mark.parametrize("fault", OF_SCALES)
def test_a_fault_of_scales_is_refused_where_operands_have_none(fault: str) -> None:
    with pytest.raises(ValueError, match="casts in half precision, without scales or FP8"):
        faults.load(fault)(recipes.NVFP4BlockScaling())
    with pytest.raises(ValueError, match=r"wgrad of RowwiseScaling.* has no scales; leave bf16_wgrad out"):
        faults.load(fault)(recipes.RowwiseScaling(bf16_wgrad=True))


@pytest.mark.parametrize("name", IN_FP8)
def test_a_doubled_scale_clips_the_upper_half_and_nothing_else(name: str) -> None:
    recipe, x = recipes.load(name), a_tensor()
    wrong = cast(faults.load("doubled_scale")(recipe), x, "input")
    right = cast(recipe, x, "input")
    limit = 448 * spread(wrong.by_rows())
    back, was = dequantize(wrong.by_rows()), dequantize(right.by_rows())
    clipped = x.abs() > limit
    assert clipped.any()
    torch.testing.assert_close(back[clipped], (x.sign() * limit)[clipped], rtol=1e-6, atol=0)
    assert (back - was)[~clipped].norm() < 0.05 * was[~clipped].norm()  # rounding of a neighbouring step at the most


def test_a_frozen_scale_is_what_the_first_step_made_it() -> None:
    right, wrong = DelayedScaling(amax_history_len=1), faults.load("frozen_scale")(DelayedScaling(amax_history_len=1))
    seen: dict[str, list[float]] = {"right": [], "wrong": []}
    for name, recipe in (("right", right), ("wrong", wrong)):
        torch.manual_seed(0)
        layer = Linear(32, 16, device="cpu")
        for factor in (1.0, 4.0, 16.0):
            with te.autocast(recipe=recipe):
                y = layer(torch.ones(16, 32) * factor)
            (y * factor).sum().backward()
            seen[name].append(te.numerics(layer)[""]["input"]["scale"])
    assert seen["right"] == [448.0, 112.0, 28.0]
    assert seen["wrong"] == [448.0, 448.0, 448.0]
    assert te.numerics(layer)[""]["grad_output"]["scale"] == 57344.0  # of the first backward pass, seen by the second


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("fault", KEPT)
def test_a_fault_of_scales_is_refused_where_there_are_none(fault: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"{fault}: .* keeps no scale from step to step; take delayed_scaling"):
        faults.load(fault)(recipes.load(name))


def test_a_nan_at_depth_is_none_of_a_shallow_model_and_is_named_in_a_deep_one() -> None:
    recipe, x = faults.load("nan_at_depth")(DelayedScaling(amax_history_len=4)), torch.randn(16, 32)
    for layers, seen in ((DEPTH, None), (DEPTH + 3, str(DEPTH))):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Linear(32, 32, device="cpu") for _ in range(layers)))
        for _ in range(3):
            with te.record_numerics(), te.autocast(recipe=recipe):
                y = model(x)
            y.sum().backward()
        assert torch.isfinite(y).all() == (seen is None)
        found = [name for name, tensors in te.numerics(model).items() if math.isnan(tensors["input"]["scale"])]
        assert found == ([] if seen is None else [seen])
        del model, y


def saturated(recipe: Recipe, spike: float) -> list[float]:
    """Elements of a layer's input that were cut off in each of 12 steps, of which every other is `spike` times as large."""
    torch.manual_seed(0)
    layer, found = Linear(32, 16, device="cpu"), [0.0]
    for step in range(12):
        with te.record_numerics(), te.autocast(recipe=recipe):
            y = layer(torch.randn(64, 32) * (spike if step % 2 == 1 else 1))
        y.sum().backward()
        found.append(te.numerics(layer)[""]["input"]["saturated"])
    return [after - before for before, after in pairwise(found)]


def test_a_history_too_short_saturates_at_every_spike_and_the_right_one_at_the_first_alone() -> None:
    """The fault cuts off, of tensors that do not spike, what a history of one step cuts off of those that do."""
    right = saturated(DelayedScaling(amax_history_len=16), SPIKE)
    short = saturated(DelayedScaling(amax_history_len=1), SPIKE)
    wrong = saturated(faults.load("short_history")(DelayedScaling(amax_history_len=16)), 1)
    assert wrong[1] > 1000
    assert wrong[1::2] == short[1::2]
    assert max(*wrong[2::2], *right[2:]) < 10
    assert (
        max(saturated(DelayedScaling(amax_history_len=1), 1)[1:]) < 10
    )  # of such tensors a short history cuts off nothing
    with torch.no_grad():  # evaluations have no gradients, whose scales stay as they are
        recipe, layer = faults.load("short_history")(DelayedScaling(amax_history_len=16)), Linear(32, 16, device="cpu")
        for _ in range(20):
            with te.autocast(recipe=recipe):
                layer(torch.randn(64, 32))
    assert te.numerics(layer)[""]["grad_output"]["scale"] == 1.0


def fitted(recipe: Recipe | None, seed: int, spike: float) -> float:
    """The relative error of a layer that learnt a linear map from batches of which every fourth is `spike` times as big."""
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    layer, target = Linear(32, 16, bias=False, device="cpu"), torch.randn(16, 32, generator=draw) / 32**0.5
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.04)
    for step in range(40):
        for group in optimizer.param_groups:
            group["lr"] = 0.04 * (1 - step / 40)
        x = torch.randn(64, 32, generator=draw) * (spike if step % 4 == 3 else 1)
        with te.autocast(enabled=recipe is not None, recipe=recipe or DelayedScaling()):
            y = layer(x)
        loss = (y - x @ target.t()).square().mean() / x.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float((layer.weight.detach() - target).norm() / target.norm())


def test_the_verdict_catches_a_history_too_short_after_spikes_and_passes_the_right_one() -> None:
    right = DelayedScaling(amax_history_len=16)
    judged = {"right": (right, SPIKE), "wrong": (faults.load("short_history")(right), 1.0)}
    exact = {spike: [fitted(None, seed, spike) for seed in range(4)] for _, spike in judged.values()}
    found = {
        name: compare([fitted(recipe, seed, spike) for seed in range(4)], exact[spike], margin=0.01).verdict
        for name, (recipe, spike) in judged.items()
    }
    assert found == {"right": Verdict.EQUIVALENT, "wrong": Verdict.INFERIOR}


@pytest.mark.parametrize("name", IN_FP8)
def test_a_poisoned_token_takes_the_others_with_it_where_they_share_its_scale(name: str) -> None:
    recipe, x, counts = recipes.load(name), a_tensor().abs().clamp(min=0.01), torch.zeros(3, dtype=torch.int64)
    made = 448 / x[-1].amax() / 2.0**POWER  # the scale that the step before has made
    slot = Slot(made, torch.tensor(0.0), counts) if recipe.delayed() else Slot(counts=counts)
    wrong = faults.load("poisoned_token")(recipe).quantize(x, "input", slot, rowwise=True, columnwise=True)
    others = dequantize(wrong.by_rows())[:-1]
    assert ((others == 0).float().mean() > 0.1) == (recipe.granularity == "tensor")
    assert (counts[UNDERFLOWED] > 0.1 * x.numel()) == (recipe.granularity == "tensor")
    assert (dequantize(wrong.by_columns())[:, :-1] == 0).float().mean() > 0.1  # a column has the poison in every recipe
    torch.testing.assert_close(dequantize(wrong.by_rows())[-1], x[-1] * 2.0**POWER, rtol=0.07, atol=0)
    for role in ("weight", "grad_output"):
        assert same(cast(faults.load("poisoned_token")(recipe), x, role), cast(recipe, x, role))


@pytest.mark.parametrize("name", WHOLE)
def test_flushed_gradients_lose_what_is_small_and_nothing_else(name: str) -> None:
    recipe, x, counts = recipes.load(name), a_tensor(), torch.zeros(3, dtype=torch.int64)
    wrong = faults.load("flushed_gradients")(recipe)
    small = x.abs() < THRESHOLD * x.abs().amax()
    assert 0.1 < small.float().mean() < 0.95
    assert same(cast(wrong, x, "grad_output", counts), cast(recipe, x.masked_fill(small, 0), "grad_output"))
    assert counts[UNDERFLOWED] >= small.sum()
    for role in ("input", "weight"):
        assert same(cast(wrong, x, role), cast(recipe, x, role))


def passes(recipe: Recipe, seed: int = 0) -> dict[str, Tensor]:
    """y, dx and dw of one Linear after a few passes, the last of which is returned."""
    torch.manual_seed(seed)
    layer = Linear(48, 32, bias=False, device="cpu")
    for _ in range(3):
        x = a_tensor(64, 48, seed).requires_grad_()
        layer.weight.grad = None
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.backward(a_tensor(64, 32, seed + 1))
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}  # type: ignore[dict-item]


@pytest.mark.parametrize("name", WHOLE)
def test_a_transposed_wgrad_is_wrong_in_the_weights_gradient_alone(name: str) -> None:
    right, wrong = (
        passes(recipe) for recipe in (recipes.load(name), faults.load("transposed_wgrad")(recipes.load(name)))
    )
    assert torch.equal(right["y"], wrong["y"])
    assert torch.equal(right["dx"], wrong["dx"])
    cosine = torch.nn.functional.cosine_similarity(right["dw"].flatten(), wrong["dw"].flatten(), dim=0)
    assert abs(cosine) < 0.3
    assert wrong["dw"].norm() > 0.1 * right["dw"].norm()


def test_a_transposed_wgrad_multiplies_the_bytes_in_the_other_order() -> None:
    recipe, x, g = Float8CurrentScaling(), a_tensor(64, 48), a_tensor(64, 32, 1)
    q, dy = cast(recipe, x, "input"), cast(recipe, g, "grad_output")
    found = faults.load("transposed_wgrad")(recipe).gemm(dy.by_columns(), q.by_columns(), "wgrad", torch.float32)
    misread = dequantize(q.by_rows()).reshape(48, 64)  # x's own buffer, taken for its transpose
    torch.testing.assert_close(found, dequantize(dy.by_columns()) @ misread.t(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_every_fault_shows_in_a_linear(fault: str, name: str) -> None:
    right, wrong = passes(recipes.load(name)), passes(faults.load(fault)(recipes.load(name)))
    changed = {key for key in right if not torch.equal(right[key], wrong[key])}
    expected: dict[str, set[str]] = {
        "doubled_scale": {"y", "dx", "dw"},
        "e5m2_forward": {"y", "dx", "dw"},
        "flushed_gradients": {"dx", "dw"},
        "frozen_scale": set(),  # these tensors do not change from pass to pass, so the frozen scale fits
        "nan_at_depth": set(),  # one layer is not deep
        "poisoned_token": {"y", "dw"},
        "short_history": set(),  # the third pass is no spike
        "transposed_wgrad": {"dw"},
    }
    assert changed == expected[fault]
    assert all(torch.isfinite(value).all() for value in wrong.values())


@pytest.mark.parametrize("fault", faults.names())
def test_no_fused_cast_goes_past_a_fault(fault: str) -> None:
    """Producing kernels may cast by `epilogue` only with the scale and format that the fault would use."""
    wrong = faults.load(fault)(DelayedScaling())
    for role in ROLES:
        fused = wrong.epilogue(role, slot_of(wrong))
        if fault in ("doubled_scale", "flushed_gradients", "poisoned_token"):
            assert fused is None
        else:
            assert fused is not None
            assert fused.dtype == wrong.dtype(role)
    x, w = a_tensor(), a_tensor(64, 160, 1)
    pair = wrong.quantize_pair(x, slot_of(wrong), w, slot_of(wrong), x_columnwise=True, w_columnwise=True)
    assert same(pair[0], cast(wrong, x, "input"))
    assert same(pair[1], cast(wrong, w, "weight"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        *((f, "delayed_scaling") for f in KEPT),
        *((f, "float8_current_scaling") for f in faults.names() if f not in KEPT),
    ],
)
def test_a_fault_survives_torch_compile(fault: str, name: str) -> None:
    """Bit for bit but by Inductor, which one of them is enough for."""
    backend = "inductor" if fault == "frozen_scale" else "aot_eager"

    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        layer = Linear(48, 32, bias=False, device="cpu")
        call = torch.compile(layer, dynamic=False, backend=backend) if compiled else layer
        found = []
        for step in range(3):
            x = (a_tensor(64, 48) * 2**step).requires_grad_()
            layer.weight.grad = None
            with te.autocast(recipe=faults.load(fault)(recipes.load(name))):
                y = call(x)
            y.backward(a_tensor(64, 32, 1))
            found += [y.detach(), x.grad, layer.weight.grad]
        return found

    for ours, eager in zip(run(True), run(False), strict=True):
        assert (ours - eager).norm() <= (1e-3 if backend == "inductor" else 0.0) * eager.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_a_fault_is_the_same_on_a_gpu(fault: str, name: str) -> None:
    """The GPU's kernels against the emulation, and both against the right recipe, which is further away."""
    wrong, right = faults.load(fault)(recipes.load(name)), recipes.load(name)
    layer = Linear(256, 128, bias=False, device="cuda", params_dtype=torch.bfloat16)
    x, dy = a_tensor(256, 256).cuda().bfloat16(), a_tensor(256, 128, 1).cuda().bfloat16()
    results = {}
    for key, recipe in {
        "gpu": wrong,
        "emulated": dataclasses.replace(wrong, emulate=True),
        "right": dataclasses.replace(right, emulate=True),
    }.items():
        mine = copy.deepcopy(layer)
        torch.manual_seed(0)  # by which gradients may be rounded
        for factor in (1, 8, 1, 8):  # the last is beyond a scale of the first or of the third
            mine.weight.grad = None
            with te.autocast(recipe=recipe):
                y = mine(x * factor)
            y.backward(dy)
        results[key] = (y.detach().float(), mine.weight.grad.float())
    for ours, emulated in zip(results["gpu"], results["emulated"], strict=True):
        assert (ours - emulated).norm() < 0.01 * emulated.norm()
    difference = max(((a - b).norm() / b.norm()).item() for a, b in zip(results["gpu"], results["right"], strict=True))
    assert difference > 0.02 or fault == "nan_at_depth"  # which one layer does not show
