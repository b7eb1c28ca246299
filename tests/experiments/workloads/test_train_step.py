"""One training step, timed: what is in the record, what diverges, what is refused."""

import dataclasses
from typing import Any

import planting
import pytest
import triton

from te_bench.experiments import timing, trial_model
from te_bench.experiments.instruments import profiling
from te_bench.experiments.measurement import CheckFailed, Context, Diverged, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import train_step
from te_bench.kernels import adamw, attention
from te_bench.models import fp8_attention
from te_bench.training.step import TrainStep

TINY = {"model": "tiny", "batch": 2, "block": 8, "vocab": 60, "padded_vocab": 64, "grad_clip": 0.0}
TRIAL = Trial(workload="train_step", device="cpu", problem=TINY, attention="flash", precision="fp32")
UNCHECKED = Context(check=False)  # where the check, most of the time, is another test's


def changed(**problem: Any) -> Trial:
    return dataclasses.replace(TRIAL, problem={**TINY, **problem})


def test_every_step_is_kept_and_the_check_comes_with_them() -> None:
    found = train_step.run(TRIAL, Context())
    assert len(found.samples["latency_s"]) == 20
    assert len(found.samples["loss"]) == 30
    assert found.samples["peak_rss_bytes"][0] > 2**20
    assert found.samples["loss"][-1] < found.samples["loss"][0]  # four batches, again and again
    assert found.work["tokens"] == 16
    assert found.work["flop"] % 16 == 0
    assert {"loss", "grad padding rows"} < {q["name"] for q in found.check["quantities"]}
    assert all(q["error"] <= q["limit"] for q in found.check["quantities"])
    assert any("flash" in name for name in found.kernels)


@pytest.mark.usefixtures("brief")
def test_micro_batches_are_of_one_step() -> None:
    whole, cut = train_step.run(changed(batch=4), UNCHECKED), train_step.run(changed(accumulate=2), Context())
    assert cut.work["tokens"] == whole.work["tokens"]
    assert cut.work["flop"] == whole.work["flop"]
    assert cut.check["quantities"]


@pytest.mark.usefixtures("brief")
def test_a_later_round_of_a_gate_is_not_checked_again_and_trains_the_same() -> None:
    checked, not_again = train_step.run(TRIAL, Context()), train_step.run(TRIAL, UNCHECKED)
    assert not_again.check == {"skipped": "checked in the first round"}
    assert not_again.samples["loss"] == checked.samples["loss"]
    assert checked.kernels
    assert not not_again.kernels  # nor looked at by a profiler


@pytest.mark.usefixtures("plain_heads")
def test_a_fast_step_is_timed_and_its_losses_are_the_plain_ones() -> None:
    plain = train_step.run(TRIAL, UNCHECKED).samples["loss"]
    fast = train_step.run(changed(head="chunked", optimizer="reference"), Context()).samples["loss"]
    assert fast == pytest.approx(plain, rel=1e-5)
    assert fast != plain  # so the settings were heeded


@pytest.mark.usefixtures("brief")
def test_the_seed_decides_the_weights_and_the_tokens() -> None:
    trials = (dataclasses.replace(TRIAL, seed=seed) for seed in (0, 0, 1))
    losses = [train_step.run(trial, UNCHECKED).samples["loss"][0] for trial in trials]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.usefixtures("brief")
def test_a_loss_that_is_not_finite_is_diverged_and_has_no_timings() -> None:
    with pytest.raises(Diverged, match="the loss is not finite") as caught:
        train_step.run(changed(learning_rate=1e30, min_learning_rate=1e30), Context())
    assert caught.value.measurement.samples == {}
    assert caught.value.measurement.check["quantities"]


@pytest.mark.usefixtures("brief")
def test_a_configuration_that_ran_another_kernel_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_attention, "load", lambda name: attention.load("math" if name == "flash" else name))
    with pytest.raises(CheckFailed, match="asked for flash, but") as caught:
        train_step.run(TRIAL, Context())
    assert caught.value.measurement.samples == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": "cudnn"}, "cudnn: needs an NVIDIA GPU"),
        ({"precision": "fp16"}, "fp16: "),
        ({"mode": "cudagraph"}, "cudagraph: CUDA graphs need an NVIDIA GPU"),
        ({"mode": "compile-reduce-overhead"}, "CUDA graphs need an NVIDIA GPU"),
        ({"problem": {**TINY, "optimizer": "triton"}}, "optimizer triton: needs an NVIDIA GPU"),
    ],
)
def test_what_a_cpu_cannot_do_is_unsupported_with_the_reason(changes, reason, monkeypatch):
    adamw.load("triton")  # first, or its kernels would not be the interpreter's in the tests that come after this one
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(Unsupported, match=reason):
        train_step.run(dataclasses.replace(TRIAL, **changes), Context())


def another_is_looked_at(patch: pytest.MonkeyPatch) -> None:
    right, other = profiling.kernels_seen, trial_model.step_of(TRIAL)
    batch = train_step.random_batches(TRIAL)[0]
    patch.setattr(profiling, "kernels_seen", lambda call, device: right(lambda: other(*batch), device))


def another_is_timed(patch: pytest.MonkeyPatch) -> None:
    right, other = timing.bench_py, trial_model.step_of(TRIAL)
    batch = train_step.random_batches(TRIAL)[0]
    patch.setattr(timing, "bench_py", lambda call, device: (call(), right(lambda: other(*batch), device))[1])


def stale_loss(patch: pytest.MonkeyPatch) -> None:
    right, last = TrainStep.__call__, list[Any]()
    patch.setattr(TrainStep, "__call__", lambda self, *batch: (last.append(right(self, *batch)), last[-2:][0])[1])


def zeroed_while_timed(patch: pytest.MonkeyPatch) -> None:
    now, right = planting.only_timed(patch, "bench_py"), TrainStep._backward
    patch.setattr(TrainStep, "_backward", lambda self, x, y: right(self, x * (not now()), y))


def weights_of_seed_0(patch: pytest.MonkeyPatch) -> None:
    right = trial_model.build
    patch.setattr(trial_model, "build", lambda trial: right(dataclasses.replace(trial, seed=0)))


def tokens_of_seed_0(patch: pytest.MonkeyPatch) -> None:
    right = trial_model.batches_of
    patch.setattr(trial_model, "batches_of", lambda trial: right(dataclasses.replace(trial, seed=0)))


def test_a_gates_clock_may_call_more_often_than_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls as long as the gate asks, and keeps some of the calls."""
    right = timing.bench_py
    monkeypatch.setattr(timing, "bench_py", lambda call, device: (call(), call(), right(call, device)[:9])[2])
    found = train_step.run(TRIAL, Context()).samples
    assert (len(found["latency_s"]), len(found["loss"])) == (9, 32)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (another_is_looked_at, "^0 updates by the step that was checked, and not 1: "),
        (another_is_timed, "^20 calls were timed, 1 of them of what was checked$"),
        (stale_loss, "^step 0 found the loss .*, and an evaluation of its batch "),
        (zeroed_while_timed, "^step 0 found the loss .*, and an evaluation of its batch "),
        (weights_of_seed_0, "^the weights do not depend on the seed 3$"),
        (tokens_of_seed_0, "^step 0 had other windows than seed 3 decides$"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_step_that_is_not_the_one_asked_for_fails(fault: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(CheckFailed, match=reason) as caught:
        train_step.run(dataclasses.replace(TRIAL, seed=3), Context())
    assert caught.value.measurement.samples == {}
