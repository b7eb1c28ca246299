"""benchmarks/compiled_loss.py: torch.compile's loss with a barrier more, and the step timed with it."""

import functools
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from te_bench.experiments import suite_trials
from te_bench.experiments.measurement import Context, Measurement
from te_bench.experiments.spec import Options, Trial


def test_a_barrier_comes_before_what_a_loop_has_stored(script, monkeypatch):
    from torch._inductor.codegen.triton import TritonKernel

    lines: list[str] = []
    monkeypatch.setattr(TritonKernel, "load", lambda self, name, index: lines.append(name))
    usual = TritonKernel.load
    stored = SimpleNamespace(invalidated_stores={"stored"})
    kernel = {"inside_reduction": True, "persistent_reduction": False, "cse": stored}
    with script("compiled_loss").barriers():
        for name, changes in (("stored", {}), ("read", {}), ("stored", {"persistent_reduction": True})):
            TritonKernel.load(
                SimpleNamespace(**kernel | changes, loads=SimpleNamespace(writeline=lines.append)), name, 0
            )  # type: ignore[arg-type]
    assert lines == ["tl.debug_barrier()", "stored", "read", "stored"]
    assert TritonKernel.load is usual


@pytest.mark.slow
def test_a_compiled_loss_beside_eagers(script, monkeypatch, capsys):
    """By Dynamo alone: of a CPU Inductor has no Triton code, into which barriers could go."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(sys, "argv", ["compiled_loss.py", "--model", "tiny", "--layers", "1", "--batch", "2"])
    script("compiled_loss").main()
    eager, compiled, with_barriers = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"eager: (\+0\.000000, ){2}\+0\.000000 of 5\.5\d+", eager)
    for name, line in (("compile", compiled), ("compile, with barriers", with_barriers)):
        assert line.startswith(f"{name}: ")
        assert all(abs(float(loss)) < 1e-3 for loss in line.removeprefix(f"{name}: ").split(", "))


def test_the_step_with_barriers_is_checked_and_timed_as_the_suites(script, monkeypatch):
    from torch._inductor.codegen.triton import TritonKernel

    sweep, usual, ran = script("compiled_loss"), TritonKernel.load, list[Trial]()

    def run(trial: Trial, context: Context) -> Measurement:
        assert context.check
        assert TritonKernel.load is not usual
        ran.append(trial)
        return Measurement(samples={"latency_s": [0.3, 0.1, 0.2]})

    monkeypatch.setattr(sweep.train_step, "run", run)
    assert sweep.timed("gpt2-large", 12, "cuda") == 200
    (trial,) = ran
    problem = {"model": "gpt2-large", "batch": 12, "block": 1024}
    mode = "compile-reduce-overhead"
    asked = suite_trials.step(Options(device="cuda"), problem, "cudnn", "bf16", mode, 0)
    assert trial == asked
