"""What a timed call leaves beside its samples: the number of calls, and how long they took by another clock."""

from collections.abc import Callable

import pytest
import torch

from te_bench.experiments import timing
from te_bench.experiments.checks.timed import Timed
from te_bench.experiments.measurement import CheckFailed, Context
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import attention, layer, linear, train_step
from te_bench.gate.interleaved_clock import cpu_block

Protocol = Callable[[Callable[[], object], str], list[float]]


def scaled(protocol: Protocol, factor: float) -> Protocol:
    return lambda call, device: [factor * x for x in protocol(call, device)]


pytestmark = pytest.mark.usefixtures("brief")


@pytest.mark.parametrize("protocol", [timing.kernel, timing.bench_py, timing.quickstart])
def test_samples_are_no_shorter_than_the_calls_and_no_longer_than_the_clock(protocol: Protocol) -> None:
    timed = Timed(lambda: sum(range(20_000)))
    assert all(1e-5 <= x < 1 for x in timed.samples(protocol, "cpu"))
    for factor in (0.01, 1000.0):
        with pytest.raises(CheckFailed, match=r"^the \d+ samples are .* s together, and .* s by another clock$"):
            timed.samples(scaled(protocol, factor), "cpu")


def test_a_clock_that_keeps_some_calls_and_counts_no_wait_for_a_core_passes() -> None:
    """A live gate's does so."""

    def every_second(call: Callable[[], object], device: str) -> list[float]:
        return cpu_block(call)(21)[::2]

    assert len(Timed(lambda: sum(range(20_000))).samples(every_second, "cpu")) == 11


@pytest.mark.gpu
@pytest.mark.parametrize("protocol", [timing.kernel, timing.bench_py, timing.quickstart])
def test_a_gpus_samples_are_no_longer_than_the_clock(protocol: Protocol) -> None:
    x = torch.randn(4096, 4096, device="cuda")
    timed = Timed(lambda: x @ x)
    assert timed.samples(protocol, "cuda")
    with pytest.raises(CheckFailed, match="by another clock"):
        timed.samples(scaled(protocol, 1000.0), "cuda")


@pytest.mark.parametrize("factor", [0.01, 1000.0])
@pytest.mark.parametrize(
    ("workload", "protocol", "problem"),
    [
        (attention, "kernel", {"batch": 2, "heads": 2, "length": 16, "head_dim": 8, "causal": True}),
        (linear, "kernel", {"tokens": 96, "in_features": 64, "out_features": 48}),
        (train_step, "bench_py", {"model": "tiny", "batch": 2, "block": 8, "vocab": 256, "padded_vocab": 256}),
        (
            layer,
            "quickstart",
            {"layer": "te_layer", "variant": "fair", "hidden": 64, "ffn": 128, "heads": 4, "sequence": 32, "batch": 2}
            | {"dropout": 0.0, "mask": "causal"},
        ),
    ],
    ids=["attention", "linear", "train_step", "layer"],
)
def test_other_times_than_those_of_its_calls_fail(workload, protocol, problem, factor, monkeypatch):
    monkeypatch.setattr(timing, protocol, scaled(getattr(timing, protocol), factor))
    name, kernel = workload.__name__.rpartition(".")[2], "none" if workload is linear else "flash"
    trial = Trial(workload=name, device="cpu", problem=problem, attention=kernel, precision="fp32")
    with pytest.raises(CheckFailed, match="by another clock"):
        workload.run(trial, Context())
