"""References that go by parts, and checks of fewer layers: the same numbers in less memory."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from te_bench.experiments import trial_model
from te_bench.experiments.checks import attention_rows, large, training_step
from te_bench.experiments.checks.gradients import Gradients
from te_bench.experiments.checks.quantity import relative_error
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import train_step
from te_bench.models import recipe as recipes
from te_bench.models.configs import configs
from te_bench.training.step import Optim, TrainStep

MODELS = ("tiny", "llama-tiny")
BY_PARTS = 2**12  # scores of a layer, or logits


def trial_of(model: str, **more: Any) -> Trial:
    problem = {"model": model, "batch": 2, "block": 64, "vocab": 250, "padded_vocab": 256}
    asked = Trial(workload="train_step", device="cpu", problem=problem, attention="flash")
    return dataclasses.replace(asked, **more)


def of_reference(asked: Trial, *more: Any) -> Gradients:
    problem = {**asked.problem, "padded_vocab": asked.problem["vocab"]}
    batch = train_step.random_batches(asked)[0]
    exact = dataclasses.replace(asked, attention="manual", problem=problem, recipe=None)
    return training_step.reference(exact, Optim(grad_clip=0.0), *batch, *more)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_reference_by_parts_is_the_reference(model, precision, fp8, monkeypatch):
    """In float64 but for its last digits; in bf16, whose yardstick is rounded as fused kernels round, nearly bit for bit."""
    as_fused = precision == "bf16"
    more = (recipes.load("float8_current_scaling") if fp8 else None, False, as_fused)
    asked = trial_of(model, precision=precision)
    loss, whole, _ = of_reference(asked, *more)
    monkeypatch.setattr(large, "LARGE", BY_PARTS)
    again, parts, _ = of_reference(asked, *more)
    limit = 1e-13 if precision == "fp64" and not fp8 else 2.5e-3  # as the gradient of the head is rounded by parts
    assert again == pytest.approx(loss, rel=1e-13 if limit < 1e-12 else 1e-4)
    assert parts.keys() == whole.keys()
    assert max(relative_error(parts[name], gradient) for name, gradient in whole.items()) < limit


def held(asked: Trial) -> int:
    """Bytes that a forward pass in float64 leaves for the backward pass."""
    model = trial_model.build(dataclasses.replace(asked, attention="manual")).double()
    if large.is_large(model.config.shape, 64):
        large.by_parts(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = model(*train_step.random_batches(asked)[0])
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("model", MODELS)
def test_nothing_but_the_blocks_inputs_is_kept(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = trial_of(model, problem={**trial_of(model).problem, "padded_vocab": 250})
    whole = held(asked)
    monkeypatch.setattr(large, "LARGE", BY_PARTS)
    rows, streams = 2 * 64 * 64 * 8, 2 + 3  # of 64 features in float64; into each block, and around the last norm
    assert held(asked) < (streams + 2) * rows < whole / 6


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"precision": "fp8", "recipe": "delayed_scaling"},
        {"precision": "fp8", "recipe": "float8_current_scaling_dpa"},
    ],
)
def test_the_check_passes_by_parts(model: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "LARGE", BY_PARTS)
    calls: list[torch.Size] = []
    usual = attention_rows.as_fused

    def noted(q: Tensor, k: Tensor, v: Tensor, **said: Any) -> Tensor:
        calls.append(k.shape)
        return usual(q, k, v, **said)

    monkeypatch.setattr(attention_rows, "as_fused", noted)
    asked = trial_of(model, **more)
    found = training_step.check_step(asked, *train_step.random_batches(asked)[0], trial_model.step_of(asked))
    assert {"loss", "attention's out, worst row"} <= {
        q["name"].partition(": ")[2] or q["name"] for q in found["quantities"]
    }
    assert {shape[1] for shape in calls} <= {1}  # a shared key at a time
    assert calls or more.get("recipe", "").endswith("_dpa")


def test_no_gpt_of_earlier_records_goes_by_parts_and_llama_at_its_length_does() -> None:
    shapes = {name: config.shape for name, config in configs().items()}
    for name in ("tiny", "char", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        assert not large.is_large(dataclasses.replace(shapes[name], vocab=50304), shapes[name].length)
    for name in ("llama3-1b", "llama3-3b", "llama3-8b", "qwen3-0.6b"):
        assert large.is_large(shapes[name], 8192)
    assert not large.is_large(shapes["llama3-1b"], 512)


@pytest.mark.parametrize(
    ("model", "gib", "layers"),
    [
        *(("gpt2-xl", 139.8, None), ("llama3-1b", 139.8, None), ("llama3-3b", 139.8, 13), ("llama3-8b", 139.8, 3)),
        *(("qwen3-0.6b", 79.2, None), ("gpt2-large", 79.2, None), ("llama3-1b", 79.2, 12), ("llama3-8b", 16.0, 1)),
    ],
)
def test_as_many_layers_are_checked_as_a_gpu_holds(model, gib, layers, monkeypatch):
    has = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(training_step.torch.cuda, "get_device_properties", lambda: has)
    config = configs()[model]
    problem = {"model": model, "batch": 1, "block": 1024, "vocab": config.vocab_size, "padded_vocab": config.vocab_size}
    asked = trial_of(model, device="cuda", problem=problem)
    found = training_step.within_memory(asked)
    assert found.problem.get("layers") == layers
    assert (found is asked) == (layers is None)
    assert trial_model.config_of(found).shape.layers == (layers or config.shape.layers)
    assert training_step.within_memory(dataclasses.replace(asked, device="cpu")).problem == asked.problem


def test_a_check_of_fewer_layers_has_a_step_of_its_own_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = trial_of("llama-tiny")
    fewer = dataclasses.replace(asked, problem={**asked.problem, "layers": 1})
    monkeypatch.setattr(training_step, "within_memory", lambda trial: fewer)
    built: list[TrainStep] = []
    usual = trial_model.step_of
    monkeypatch.setattr(trial_model, "step_of", lambda trial: built.append(usual(trial)) or built[-1])
    step, check = training_step.begin(asked, *train_step.random_batches(asked)[0])
    model: Any = step.model
    assert len(model.attentions()) == 2
    assert [len(each.model.attentions()) for each in built] == [1, 2]  # type: ignore[operator]
    assert check["reference"].endswith(", both with 1 of the model's layers")
    assert not [q for q in check["quantities"] if "layers.1." in q["name"]]
