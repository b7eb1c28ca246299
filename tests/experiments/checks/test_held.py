"""A peak of memory is no less than what was held."""

from typing import Any

import pytest
import torch
from torch import nn

from te_bench.experiments import trial_model
from te_bench.experiments.checks import held
from te_bench.experiments.instruments import memory
from te_bench.experiments.measurement import CheckFailed, Context
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import attention, layer, linear_cross_entropy, train_step, training

STEP = {"model": "tiny", "batch": 2, "block": 16, "vocab": 250, "padded_vocab": 256}
LAYER = {"layer": "te_layer", "variant": "fair", "hidden": 64, "ffn": 128, "heads": 4, "sequence": 32, "batch": 2}
CASES: dict[Any, dict[str, Any]] = {
    attention: {"batch": 2, "heads": 2, "length": 16, "head_dim": 8, "causal": True},
    layer: {**LAYER, "dropout": 0.0, "mask": "causal"},
    linear_cross_entropy: {"n": 60, "d": 32, "vocab": 90, "padded": 96, "head": "chunked"},
    train_step: STEP,
    training: {**STEP, "data": "random", "steps": 4, "eval_every": 2, "eval_tokens": 64},
}


def a_trial(workload: Any, device: str = "cpu", mode: str = "eager", **problem: Any) -> Trial:
    name, kernel = workload.__name__.rpartition(".")[2], "none" if workload is linear_cross_entropy else "flash"
    problem = {**CASES[workload], **problem}
    return Trial(workload=name, device=device, problem=problem, attention=kernel, precision="bf16", mode=mode)


@pytest.fixture
def half(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peak is half of what it is."""
    right = memory.peak
    monkeypatch.setattr(memory, "peak", lambda *of: {name: [x / 2 for x in xs] for name, xs in right(*of).items()})


@pytest.mark.parametrize("workload", CASES, ids=lambda x: x.__name__.rpartition(".")[2])
def test_half_of_a_cpus_peak_fails(workload: Any, half: None) -> None:
    with pytest.raises(CheckFailed, match=r"^peak_rss_bytes: .* MiB, but .* MiB are held$"):
        workload.run(a_trial(workload), Context())


@pytest.mark.parametrize("optimizer", [None, "reference"])
def test_a_step_holds_weights_moments_gradients_and_its_batch(optimizer: str | None) -> None:
    """Twelve bytes a parameter in float32, and four of gradients, which an optimizer by a table keeps in its own way."""
    trial = a_trial(train_step, optimizer=optimizer)
    step, batch = trial_model.step_of(trial), train_step.random_batches(trial)[0]
    step(*batch)
    count = sum(p.numel() for p in step.model.parameters())
    least = held.of_step(step, batch)
    assert (12 if optimizer else 16) * count <= least < 18 * count
    held.require({"peak_allocated_bytes": [float(least)]}, least)
    with pytest.raises(CheckFailed, match=r"^peak_allocated_bytes"):
        held.require({"peak_allocated_bytes": [least / 2]}, least)


def test_what_two_names_share_is_held_once_and_a_step_holds_no_gradients_before_its_first_update() -> None:
    x = torch.zeros(1000)
    assert held.of_tensors([x, x[:10], nn.Parameter(x)]) == held.of_tensors([x]) == 4000
    trial = a_trial(train_step)
    step = trial_model.step_of(trial)
    assert held.of_step(step, ()) < 5 * sum(p.numel() for p in step.model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compile", "compile-blocks", "compile-reduce-overhead", "cudagraph"])
def test_a_gpus_peak_passes_and_half_of_a_peak_that_weights_fill_fails(mode: str, monkeypatch: Any) -> None:
    trial = a_trial(train_step, "cuda", mode, model="gpt2", vocab=50257, padded_vocab=50304, batch=1)
    found = train_step.run(trial, Context()).samples
    assert found["peak_reserved_bytes"][0] > 12 * 124e6
    right = memory.peak
    monkeypatch.setattr(memory, "peak", lambda *of: {name: [x / 2 for x in xs] for name, xs in right(*of).items()})
    with pytest.raises(CheckFailed, match=r"^peak_\w+_bytes: .* MiB are held$"):
        train_step.run(trial, Context())
