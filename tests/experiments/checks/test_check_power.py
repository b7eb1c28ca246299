"""What the check of a step has to see however loud FP8 is: a scale that is off, a wrong row, attention nearly right."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from planting import FAULTS_OF_ATTENTION, attention_of
from torch import Tensor
from whole_recipes import WHOLE

from te_bench.experiments import trial_model
from te_bench.experiments.checks import attention_rows, gradients, rounding, training_step
from te_bench.experiments.checks.gradients import settle
from te_bench.experiments.measurement import CheckFailed
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import train_step
from te_bench.models import recipe as recipes
from te_bench.training.step import TrainStep

CASES = [("bf16", None), *(("fp8", recipe) for recipe in WHOLE)]
MATRICES = [
    *(f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    "transformer.wte.weight",
    "transformer.wpe.weight",
]
pytestmark = pytest.mark.usefixtures("references_once")


def every_second(names: Iterable[str]) -> pytest.MarkDecorator:
    """Each of the names with every second case, and each case with every second name."""
    chosen = [(x, *case) for i, x in enumerate(names) for j, case in enumerate(CASES) if (i + j) % 2 == 0]
    return pytest.mark.parametrize(("name", "precision", "recipe"), chosen)


def a_trial(precision: str, recipe: str | None, seed: int = 0, **problem: Any) -> Trial:
    sizes = {"model": "tiny", "batch": 4, "block": 64, "vocab": 250, "padded_vocab": 256, **problem}
    said: dict[str, Any] = {"precision": precision, "recipe": recipe, "seed": seed}
    return Trial(workload="train_step", device="cpu", problem=sizes, attention="flash", **said)


def in_fp4(recipe: str | None) -> bool:
    return recipe is not None and recipes.load(recipe).nvfp4()


def checked(trial: Trial, step: TrainStep) -> dict[str, Any]:
    return training_step.check_step(trial, *train_step.random_batches(trial)[0], step)


def with_gradients(
    trial: Trial, references: dict[Any, Any], change: Callable[[dict[str, Tensor]], None] = lambda found: None
) -> TrainStep:
    """A step whose gradients are the right ones, worked out once, but for `change`."""
    step = trial_model.step_of(trial)
    if ("ours", trial.id) not in references:
        batch = train_step.random_batches(trial)[0]
        settle(trial.recipe, lambda: step.gradients(*batch, records=True))
        references["ours", trial.id] = step.gradients(*batch), step.grad_norm

    def gradients(tokens: Tensor, targets: Tensor, **how: bool) -> tuple[float, dict[str, Tensor]]:
        (loss, found), step.grad_norm = references["ours", trial.id]
        found = dict(found)
        change(found)
        return loss, found

    step.gradients = gradients  # type: ignore[method-assign]
    return step


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_gradients_that_are_all_too_large_fail_though_clipping_hides_them(factor: float) -> None:
    trial = a_trial("bf16", None, grad_clip=0.01)
    step = trial_model.step_of(trial)
    step.scaler.scale = lambda loss: factor * loss  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(CheckFailed, match="norm of all gradients before clipping"):
        checked(trial, step)


@every_second(MATRICES)
def test_a_gradient_that_is_a_little_too_large_fails(name, precision, recipe, references):
    """By 10 % in FP8, whose gradients err by as much element by element; by 2 % in bf16, by 25 % in FP4."""
    factor = 1.02 if precision == "bf16" else 1.25 if in_fp4(recipe) else 1.1

    def change(found: dict[str, Tensor]) -> None:
        found[name] = found[name] * factor

    trial = a_trial(precision, recipe)
    with pytest.raises(CheckFailed) as failed:
        checked(trial, with_gradients(trial, references, change))
    wrong = [q["name"] for q in failed.value.measurement.check["quantities"] if q["error"] > q["limit"]]
    assert {re.sub("( [qkv])?(, scale)?$", "", quantity) for quantity in wrong} == {f"grad {name}"}


@pytest.mark.parametrize(("precision", "recipe", "row"), [(*case, (0, 255)[i % 2]) for i, case in enumerate(CASES)])
def test_one_row_of_256_that_is_zero_fails(precision, recipe, row, references):
    """In FP4, whose elements err by a third, one of the wrong sign: zeros are within that noise (docs/fp8-details.md)."""
    factor = -1 if in_fp4(recipe) else 0
    for name, side in (("mlp.c_fc", 0), ("mlp.c_proj", 1)):

        def change(found: dict[str, Tensor], name: str = f"transformer.h.1.{name}.weight", side: int = side) -> None:
            found[name] = found[name].clone()
            found[name].select(side, row).mul_(factor)

        trial = a_trial(precision, recipe)
        with pytest.raises(CheckFailed, match=f"{name}.weight, worst row"):
            checked(trial, with_gradients(trial, references, change))


@every_second(FAULTS_OF_ATTENTION)
def test_attention_that_is_a_little_wrong_fails(name: str, precision: str, recipe: str | None) -> None:
    if recipe is not None and recipe.endswith("dpa") and "1 %" in name:
        return  # attention's own FP8 is louder than that
    trial = a_trial(precision, recipe)
    step = trial_model.step_of(trial)
    attention_of(step, FAULTS_OF_ATTENTION[name])
    with pytest.raises(CheckFailed) as failed:
        checked(trial, step)
    wrong = [q["name"] for q in failed.value.measurement.check["quantities"] if q["error"] > q["limit"]]
    assert any("attention's" in name for name in wrong), wrong


@pytest.mark.parametrize("fault", FAULTS_OF_ATTENTION)
def test_attention_of_fused_blocks_is_held_apart_too(fault: str) -> None:
    trial = a_trial("bf16", None, blocks="fused")
    step = trial_model.step_of(trial)
    attention_of(step, FAULTS_OF_ATTENTION[fault])
    with pytest.raises(CheckFailed, match="attention"):
        checked(trial, step)


@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_not_a_number_in_one_layer_is_not_hidden_by_another(layer: int) -> None:
    trial = a_trial("bf16", None)
    step = trial_model.step_of(trial)
    model: Any = step.model
    block = model.transformer.h[layer].attn
    right = block.attention

    def wrong(q: Any, *others: Any, **said: Any) -> Any:
        q.register_hook(lambda gradient: gradient * math.nan)
        return right(q, *others, **said)

    block.attention = wrong
    tokens, targets = train_step.random_batches(trial)[0]
    found = {q.name.partition("'s ")[2]: q for q in attention_rows.check(step, tokens, targets, "flash", "bf16")}
    assert found["dq, scale"].wrong
    assert found["dq, worst row"].wrong


def test_a_layer_whose_attention_is_not_called_fails() -> None:
    trial = a_trial("bf16", None)
    step = trial_model.step_of(trial)
    step.model.transformer.h[1].attn.forward = lambda x: 0 * x  # type: ignore[index,union-attr]
    with pytest.raises(CheckFailed) as failed:
        checked(trial, step)
    quantities = {q["name"]: q for q in failed.value.measurement.check["quantities"]}
    assert quantities["attention, layers that did not call it"]["error"] == 1


def test_the_check_leaves_gradients_and_attention_as_they_were() -> None:
    trial = a_trial("bf16", None)
    step = trial_model.step_of(trial)
    weight = step.model.transformer.wte.weight  # type: ignore[union-attr]
    weight.grad = gradient = torch.ones_like(weight)  # type: ignore[arg-type,assignment]
    before = [block.attn.attention for block in step.model.transformer.h]  # type: ignore[union-attr]
    checked(trial, with_gradients(trial, {}))
    assert weight.grad is gradient
    assert bool((gradient == 1).all())
    assert [block.attn.attention for block in step.model.transformer.h] == before  # type: ignore[union-attr]


def test_a_scale_is_known_far_better_than_an_element() -> None:
    """Noise of 10 % in 64 x 64 elements hides 4 % in none of 50 draws, and no draw without a fault is beyond its limit."""
    generator = torch.Generator().manual_seed(0)

    def noisy(x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=generator).double()

    for _ in range(50):
        truth = torch.randn(64, 64, generator=generator).double()
        known = noisy(truth)
        right, row = rounding.quantities("x", noisy(truth), truth, known, "fp8")
        wrong, _ = rounding.quantities("x", 1.04 * noisy(truth), truth, known, "fp8")
        assert right.error < right.limit < 0.03
        assert wrong.wrong
        assert row.error < 0.6
        assert math.isnan(rounding.quantities("x", None, truth, known, "fp8")[0].error)


def test_errors_in_a_few_directions_are_no_fault_of_scale() -> None:
    """As in a model whose tokens are nearly alike: of 50 right draws none is beyond its limit, and 10 % too much is."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(256, 8, generator=generator).double()).Q for _ in range(2))
    truth = left @ right.T

    def rounded() -> torch.Tensor:
        """Each of the truth's eight directions errs by 1 % as a whole, and each element of it by 1 % of its size."""
        odd = 0.01 * torch.randn(8, generator=generator).double()
        return (left * (1 + odd)) @ right.T + 0.01 * truth * torch.randn(truth.shape, generator=generator).double()

    for _ in range(50):
        known, ours = rounded(), rounded()
        assert not rounding.quantities("x", ours, truth, known, "fp32")[0].wrong
        assert rounding.quantities("x", 1.1 * ours, truth, known, "fp32")[0].wrong


def test_a_row_that_is_gone_is_seen_among_thousands() -> None:
    generator = torch.Generator().manual_seed(1)
    truth, noise, more = (torch.randn(4096, 64, generator=generator).double() for _ in range(3))
    for shape in (truth.shape, truth.T.shape, (64, 64, 64)):
        x, y, t = ((v.T if shape[0] == 64 and len(shape) == 2 else v).reshape(shape) for v in (noise, more, truth))
        found = t + 0.1 * x
        assert not any(q.wrong for q in rounding.quantities("x", found, t, t + 0.1 * y, "fp8"))
        found.flatten(0, -2)[17].zero_()
        assert rounding.quantities("x", found, t, t + 0.1 * y, "fp8")[1].wrong


def test_a_number_of_which_one_yardstick_knows_little_is_held_to_many() -> None:
    """Of 300 right draws of one number none is beyond the limits of 12 yardsticks; with another sign all are."""
    generator = torch.Generator().manual_seed(0)
    truth = {"g": torch.ones(1).double()}
    by_one = by_many = caught = 0
    for _ in range(300):
        ours, *known = (1 + 0.1 * torch.randn(13, generator=generator).double()).split(1)

        def wrong(x: Tensor, count: int, known: list[Tensor] = known) -> bool:
            first, *more = ({"g": each} for each in known[:count])
            return any(q.wrong for q in gradients.beside({"g": x}, first, truth, "bf16", more=more)[0])

        by_one += wrong(ours, 1)
        by_many += wrong(ours, 12)
        caught += wrong(-ours, 12)
    assert (by_one > 100, by_many, caught) == (True, 0, 300)


def test_a_loss_and_a_norm_are_held_to_many_yardsticks() -> None:
    truth, first = gradients.Gradients(5.0, {}, 1.0), gradients.Gradients(5.001, {}, 1.001)
    more = [gradients.Gradients(5.0 + sign * 0.1, {}, 1.0 + sign * 0.05) for sign in (-1, 1) * 4]

    def wrong(loss: float, norm: float) -> list[str]:
        ours = gradients.Gradients(loss, {"g": torch.ones(1)}, norm)
        every = [one._replace(of={"g": torch.ones(1).double()}) for one in (first, truth, *more)]
        found = gradients.compared(ours, *every[:2], precision="bf16", targets=64, more=every[2:])
        return [q.name for q in found if q.wrong]

    assert wrong(5.1, 0.95) == []
    assert wrong(6.0, 2.0) == ["loss", "norm of all gradients before clipping"]


def test_a_parameter_without_elements_has_no_error() -> None:
    nothing = torch.zeros(0, 8)
    assert not any(q.wrong for q in rounding.quantities("x", nothing, nothing, nothing, "bf16"))
