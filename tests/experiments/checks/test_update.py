"""The check of whole steps: what trains otherwise than the gradients that were looked at fails, and leaves no trace."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_bench.experiments import trial_model
from te_bench.experiments.checks import training_step, update
from te_bench.experiments.measurement import CheckFailed, Context
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import train_step
from te_bench.kernels import adamw
from te_bench.kernels.adamw.backends import reference
from te_bench.training import step as steps
from te_bench.training.step import TrainStep

pytestmark = pytest.mark.usefixtures("one_thread", "plain_heads")
SIZES = {"model": "tiny", "batch": 4, "block": 16, "vocab": 250, "padded_vocab": 256}
TABLE = {"optimizer": "reference"}
FUSED = {**TABLE, "head": "chunked", "blocks": "fused"}


def a_trial(recipe: str | None = None, **problem: Any) -> Trial:
    said: dict[str, Any] = {"precision": "bf16" if recipe is None else "fp8", "recipe": recipe}
    return Trial(workload="train_step", device="cpu", problem={**SIZES, **problem}, attention="flash", **said)


def begun(trial: Trial) -> tuple[TrainStep, dict[str, Any]]:
    return training_step.begin(trial, *train_step.random_batches(trial)[0])


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        (None, {}),
        (None, {"states": "bf16", "weights": "bf16"}),
        ("delayed_scaling", {**FUSED, "accumulate": 2}),
        ("nvfp4_block_scaling", {}),  # which draws random numbers
    ],
)
def test_an_honest_step_passes_and_trains_as_if_nobody_had_looked(recipe, problem, monkeypatch):
    trial = a_trial(recipe, **problem)
    batches = train_step.random_batches(trial)

    def trained() -> tuple[dict[str, Any], list[float]]:
        step, check = begun(trial)
        torch.manual_seed(0)
        return check, [step(*batch).item() for batch in batches[:3]]

    check, losses = trained()
    names = {q["name"] for q in check["quantities"]}
    updated = {f"update {name}" for name, _ in trial_model.build(trial).named_parameters()}
    assert names >= updated | {"grad of update 1", "grad of update 2"}
    monkeypatch.setattr(training_step.update, "checked", lambda check, *_: check)
    assert trained()[1] == losses


# What is wrong in the update, or in all but the gradients that are looked at.


def half_of_the_batch(patch: pytest.MonkeyPatch) -> None:
    right = TrainStep.__call__

    def call(self: TrainStep, *batch: Tensor) -> Tensor:
        return right(self, *(x[: len(x) // 2].repeat(2, 1) for x in batch))

    patch.setattr(TrainStep, "__call__", call)


def decay(by: Callable[[Any, float], float]) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        right = steps.adamw

        def wrong(model: nn.Module, optim: Any, **more: Any) -> Any:
            made = right(model, optim, **more)
            for group in made.param_groups:
                group["weight_decay"] = by(group["weight_decay"], optim.weight_decay)
            return made

        patch.setattr(steps, "adamw", wrong)

    return mutate


def table(**change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A backend that is given other numbers."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        owner = adamw.load("reference")

        def step(of: Any, **said: Any) -> None:
            of = change["of"](of) if "of" in change else of
            owner.step(of, **{name: change[name](x) if name in change else x for name, x in said.items()})

        patch.setattr(adamw, "load", lambda _: dataclasses.replace(owner, step=step))

    return mutate


def stale_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "_emit", lambda _: None)


def kept_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrainStep, "_end", lambda _: None)


def twice(patch: pytest.MonkeyPatch) -> None:
    right = TrainStep._update
    patch.setattr(TrainStep, "_update", lambda self: (right(self), right(self)))


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "half of the batch": (half_of_the_batch, {"accumulate": 2}),
    "vectors decay": (decay(lambda _, asked: asked), {}),
    "nothing decays": (decay(lambda *_: 0.0), {}),
    "two updates": (twice, {}),
    "gradients kept": (kept_gradients, {}),
    "no bias correction": (table(step=lambda x: torch.full_like(x, 1e6)), TABLE),
    "the first bias correction for good": (table(step=torch.ones_like), TABLE),
    "a large eps": (table(eps=lambda _: 1e-4), TABLE),
    "betas exchanged": (table(betas=lambda x: x[::-1]), TABLE),
    "no clipping": (table(multiplier=lambda _: None), {**TABLE, "grad_clip": 0.01}),
    "twice the rate": (table(rate=lambda x: 2 * x), TABLE),
    "every second parameter": (table(of=lambda x: dataclasses.replace(x, parameters=x.parameters[::2])), TABLE),
    "copies of the weights before": (stale_copies, TABLE),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_trains_wrongly_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, problem = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(CheckFailed, match=r"^(update|grad of update)"):
        begun(a_trial(**problem))


def restless(patch: pytest.MonkeyPatch, share: float) -> None:
    """Gradients that each pass rounds otherwise, by numbers that torch's generator does not draw."""
    right, draws = TrainStep._backward, torch.Generator().manual_seed(1)

    def backward(self: TrainStep, *batch: Tensor) -> Tensor:
        loss = right(self, *batch)
        owned = self.table and self.table.gradients().values()
        for g in owned or [p.grad for p in self.model.parameters()]:
            g += share * torch.randn(g.shape, generator=draws) * torch.linalg.vector_norm(g) / g.numel() ** 0.5
        return loss

    patch.setattr(TrainStep, "_backward", backward)


@pytest.mark.parametrize(
    ("fault", "problem"), [(None, {}), (half_of_the_batch, {}), (stale_copies, TABLE)], ids=["honest", "half", "stale"]
)
def test_a_step_is_held_to_what_its_passes_differ_by(fault: Any, problem: dict[str, Any], monkeypatch) -> None:
    trial = a_trial(**problem)
    step, _ = begun(trial)
    batch = train_step.random_batches(trial)[0]
    restless(monkeypatch, 0.14)
    if fault is None:
        check = training_step.update.checked({"quantities": []}, step, *batch)
        found = {q["name"]: q for q in check["quantities"]}["grad of update 1"]
        assert 0.18 < found["error"] < found["limit"] < 0.25
        return
    fault(monkeypatch)
    with pytest.raises(CheckFailed, match=r"^grad of update"):
        training_step.update.checked({"quantities": []}, step, *batch)


def test_passes_that_hardly_agree_are_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = a_trial()
    step, _ = begun(trial)
    restless(monkeypatch, 0.5)
    with pytest.raises(CheckFailed, match=r"^grad of update"):
        training_step.update.checked({"quantities": []}, step, *train_step.random_batches(trial)[0])


# What the references must not share with the step.


def one_micro_batch_for_all(patch: pytest.MonkeyPatch) -> None:
    right = TrainStep._backward

    def backward(self: TrainStep, *batch: Tensor) -> Tensor:
        n = self.optim.accumulate
        return right(self, *(x[: len(x) // n].repeat(n, 1) for x in batch))

    patch.setattr(TrainStep, "_backward", backward)


def summed_micro_batches(patch: pytest.MonkeyPatch) -> None:
    right = TrainStep._backward

    def backward(self: TrainStep, *batch: Tensor) -> Tensor:
        one = self.forward
        patch.setattr(self, "forward", lambda *x: one(*x) * self.optim.accumulate)
        loss = right(self, *batch) / self.optim.accumulate
        self.forward = one
        return loss

    patch.setattr(TrainStep, "_backward", backward)


def another_norm(patch: pytest.MonkeyPatch) -> None:
    right = nn.utils.clip_grad_norm_
    patch.setattr(nn.utils, "clip_grad_norm_", lambda p, most, **more: right(p, most, **{**more, "norm_type": 1.0}))


@pytest.mark.parametrize(
    "fault", [one_micro_batch_for_all, summed_micro_batches, another_norm], ids=lambda f: f.__name__
)
def test_a_fault_in_code_that_every_step_shares_fails(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = a_trial(accumulate=2)
    step = trial_model.step_of(trial)
    fault(monkeypatch)
    with pytest.raises(CheckFailed):
        training_step.check_step(trial, *train_step.random_batches(trial)[0], step)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compile", "cudagraph"])
@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        (None, {}),
        (None, {"head": "chunked", "optimizer": "triton", "blocks": "fused", "accumulate": 2}),
        (None, {"optimizer": "triton", "states": "bf16", "weights": "bf16"}),
        ("delayed_scaling", {"head": "fp8", "optimizer": "triton", "blocks": "fused", "accumulate": 2}),
        ("delayed_scaling_e4m3", {"head": "fp8", "optimizer": "triton", "blocks": "fused"}),
        ("float8_current_scaling", {"head": "chunked", "optimizer": "triton", "blocks": "fused"}),
        ("float8_block_scaling", {}),
    ],
)
def test_an_honest_step_on_a_gpu_is_far_within_the_limits(recipe, problem, mode):
    """Half of them, so that the check may be asked there."""
    sizes = {"model": "gpt2", "layers": 2, "batch": 4, "block": 256, "vocab": 50257, "padded_vocab": 50304}
    trial = dataclasses.replace(a_trial(recipe, **{**sizes, **problem}), device="cuda", mode=mode)
    _, check = begun(trial)
    found = [q for q in check["quantities"] if q["name"].startswith(("update ", "grad of update"))]
    assert {"grad of update 1", "grad of update 2"} <= {q["name"] for q in found}
    assert [q for q in found if q["error"] > q["limit"] / 2] == []


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compile", "cudagraph"])
@pytest.mark.parametrize(
    ("recipe", "head"),
    [
        (None, "chunked"),
        ("delayed_scaling_e4m3", "chunked"),
        ("delayed_scaling_e4m3", "fp8"),
        ("float8_current_scaling", "chunked"),
    ],
)
def test_an_honest_step_on_a_gpu_does_as_it_was_foretold(recipe, head, mode):
    sizes = {"model": "gpt2", "layers": 2, "batch": 4, "block": 256, "vocab": 50257, "padded_vocab": 50304}
    problem = {**sizes, "head": head, "optimizer": "triton", "blocks": "fused"}
    trial = dataclasses.replace(a_trial(recipe, **problem), device="cuda", mode=mode)
    assert train_step.run(trial, Context()).samples["latency_s"]


def trained_by_fp8_head() -> tuple[Trial, TrainStep, tuple[Tensor, Tensor]]:
    trial = a_trial("delayed_scaling_e4m3", **{**FUSED, "head": "fp8"})
    batch = train_step.random_batches(trial)[0]
    step = trial_model.step_of(trial)
    for _ in range(20):
        step(*batch)
    return trial, step, batch


def test_an_fp8_head_is_held_to_an_evaluation_by_itself_and_loosely_to_one_by_a_bf16_head():
    trial, step, batch = trained_by_fp8_head()
    told = training_step.foretold(trial, step, lambda: batch)
    assert told is not None
    assert told.by_trained_head is not None
    found = step(*batch).item()
    assert abs(found - told.by_trained_head) < abs(found - told.loss) < 2e-3 * found
    training_step.require_foretold(20, found, told)
    for wrong in (told._replace(by_trained_head=1.006 * found), told._replace(loss=0.97 * found)):
        with pytest.raises(CheckFailed, match=r"^step 20 found the loss .*, and an evaluation of its batch "):
            training_step.require_foretold(20, found, wrong)
    for nothing in (told._replace(loss=math.nan), told._replace(by_trained_head=math.nan)):
        with pytest.raises(CheckFailed):
            training_step.require_foretold(20, found, nothing)


@pytest.mark.parametrize("head", ["chunked", "fp8"])
def test_a_head_that_trains_by_old_weights_is_seen(head, monkeypatch):
    """The evaluation of such a head by itself would find the same."""
    trial = a_trial("delayed_scaling_e4m3", **{**FUSED, "head": head, "learning_rate": 1e-2})
    batch = train_step.random_batches(trial)[0]
    step = trial_model.step_of(trial)
    right, kept = step.model.heads[True], list[Tensor]()

    def old(hidden: Tensor, weight: Tensor, *more: Any, **named: Any) -> Any:
        kept.append(weight.detach().clone())
        return right.forward(hidden, kept[0], *more, **named)

    monkeypatch.setitem(step.model.heads, True, dataclasses.replace(right, forward=old, copied=False))
    for _ in range(20):
        step(*batch)
    told = training_step.foretold(trial, step, lambda: batch)
    with pytest.raises(CheckFailed, match=r"^step 20 found the loss"):
        training_step.require_foretold(20, step(*batch).item(), told)


@pytest.mark.parametrize(("recipe", "problem"), [(None, {}), ("delayed_scaling", FUSED)])
@pytest.mark.parametrize("room", [0, 2**17])
def test_a_gpu_without_room_has_as_many_parameters_compared_as_fit(recipe, problem, room, monkeypatch):
    """The largest that fit; the step is left as it was all the same, and a wrong gradient of those is seen."""
    monkeypatch.setattr(update, "_room", lambda step: room)
    trial = a_trial(recipe, **problem)
    step = trial_model.step_of(trial)
    batch = train_step.random_batches(trial)[0]
    before = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    check = update.checked({"quantities": []}, step, *batch)
    found = {q["name"].removeprefix("update ") for q in check["quantities"]} & before.keys()
    assert bool(found) == bool(room)
    assert sum(before[name].nbytes for name in found) * update.COPIES <= room
    assert all(torch.equal(parameter, before[name]) for name, parameter in step.model.named_parameters())
    if room:
        half_of_the_batch(monkeypatch)
        with pytest.raises(CheckFailed, match="grad of update"):
            update.checked({"quantities": []}, trial_model.step_of(trial), *batch)
