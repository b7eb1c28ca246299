"""The child's side: every exception is one outcome with a reason in one line, and the reply is always JSON."""

import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_bench.experiments import host
from te_bench.experiments import trial as child
from te_bench.experiments.measurement import CheckFailed, Context, Diverged, Measurement, Unsupported
from te_bench.experiments.spec import Trial, canonical_json
from te_bench.models import sources

WRONG = "Could not import module 'X'"
KEPT = Measurement(check={"reference": "r"}, work={"tokens": 1}, samples={"loss": [1.0]}, kernels=["k"])


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (Unsupported("flash: head_dim 512 > 256"), "unsupported", "flash: head_dim 512 > 256"),
        (CheckFailed("dq: error 3 > 1", KEPT), "failed_check", "dq: error 3 > 1"),
        (Diverged("the loss is nan at step 3", KEPT), "diverged", "the loss is nan at step 3"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "oom", "GPU: CUDA out of memory. Tried"),
        (RuntimeError("CUDA error: out of memory"), "oom", "GPU: CUDA error: out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"), "oom", "GPU: CUDA error: CUBLAS_STATUS_ALLOC"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "oom", "GPU: cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        (MemoryError(), "oom", "host: out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "oom", "host: DefaultCPUAllocator: can't"),
        (ModuleNotFoundError("No", name="flash_attn"), "unsupported", "needs the package flash_attn: pip install"),
        (ModuleNotFoundError("No", name="torch.new"), "unsupported", "needs torch.new, which the installed torch"),
        (ModuleNotFoundError(WRONG), "unsupported", "a package that it needs is missing or of the wrong version: "),
        (ModuleNotFoundError("No", name="te_bench.x"), "crashed", "ModuleNotFoundError: No"),
        (RuntimeError("CUDA error: an illegal access"), "crashed", "RuntimeError: CUDA error: an illegal access"),
        (ValueError("two\n lines"), "crashed", "ValueError: two lines"),
        (ValueError("x" * 9000), "crashed", "ValueError: xxx"),
        (
            OSError("no file \udcff"),
            "crashed",
            "OSError: no file ?",
        ),  # a name that is no UTF-8, which no report could hold
    ],
)
def test_an_exception_is_an_outcome_and_a_line(error: Exception, outcome: str, reason: str) -> None:
    found, said = child.classify(error)
    assert found == outcome
    assert said.startswith(reason)
    assert "\n" not in said
    assert len(said) < 600


def test_a_package_that_transformers_cannot_import_is_told_with_the_cause() -> None:
    error = ModuleNotFoundError(WRONG)
    error.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    assert child.classify(error)[1].endswith("(RuntimeError: operator torchvision::nms does not exist)")


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> Any:
    """reply = workload(what run() does, settings of its problem)"""

    def with_run(run: Any, **problem: Any) -> dict[str, Any]:
        module = types.ModuleType("te_bench.experiments.workloads.training")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        trial = Trial(workload="training", device="cpu", problem=problem, attention="manual")
        reply = child.run(trial, Context())
        canonical_json(reply)
        return reply

    return with_run


def raising(error: Exception) -> Any:
    def run(trial: Trial, context: Context) -> Measurement:
        raise error

    return run


@pytest.mark.parametrize("edited", ["WIDTH = 64", "WIDTH = (", None], ids=["other code", "half a line", "gone"])
def test_a_user_s_model_that_was_edited_after_the_plan_is_not_measured_as_the_planned_one(
    edited: str | None, workload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers.py").write_text("WIDTH = 32")
    (tmp_path / "mine.py").write_text("from layers import WIDTH\ndef make(): ...")
    source = sources.identify("mine:make", loss="layers:loss")
    assert source is not None
    how = {"batch": 1, "block": 8, "vocab": 64, "padded_vocab": 64, "data": "random", **source.settings}
    assert workload(lambda trial, context: KEPT, **how)["outcome"] == "ok"
    (tmp_path / "layers.py").unlink()
    if edited is not None:
        (tmp_path / "layers.py").write_text(edited)
    reply = workload(lambda trial, context: KEPT, **how)
    assert (reply["outcome"], reply["samples"]) == ("interrupted", {})
    assert reply["reason"] == "mine:make: its code has been changed since the trial was planned; run the command again"


@pytest.mark.parametrize(
    ("cached", "held", "outcome"), [(True, b"", "ok"), (True, b"\x7fELF", "crashed"), (False, b"", "crashed")]
)
def test_a_library_that_a_killed_compiler_left_empty_is_made_again(
    workload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool, held: bytes, outcome: str
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    library = tmp_path / ("cache" if cached else "mine") / "main.so"
    library.parent.mkdir()
    library.write_bytes(held)

    def run(trial: Trial, context: Context) -> Measurement:
        if library.exists():
            raise RuntimeError(f"ImportError: {library}: file too short Set TORCHDYNAMO_VERBOSE=1")
        return KEPT

    assert workload(run)["outcome"] == outcome
    assert library.exists() == (outcome == "crashed")


def test_what_was_measured_is_in_the_reply(workload: Any) -> None:
    reply = workload(lambda trial, context: KEPT)
    assert (reply["outcome"], reply["reason"]) == ("ok", None)
    for name in ("check", "work", "samples", "kernels"):
        assert reply[name] == getattr(KEPT, name)
    assert 0 <= reply["work_s"] < 1


def test_the_reply_says_what_the_machine_was_doing(workload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times: Iterator[host.CpuTime] = iter(())
    monkeypatch.setattr(host, "cpu_time", lambda *_: next(times))
    for outcome, run in (("ok", lambda *_: KEPT), ("crashed", raising(RuntimeError("no")))):
        times = iter([host.CpuTime(100.0, 50.0, 0.0, 5.0), host.CpuTime(140.0, 60.0, 2.0, 13.0)])
        reply = workload(run)
        state = reply["device_state"]
        assert reply["outcome"] == outcome
        assert (state["cpu_idle"], state["cpu_stolen"]) == (0.25, 0.05)
        assert state["cpu_others"] == pytest.approx(20 / 40 * state["host_cores"])


@pytest.mark.parametrize("error", [CheckFailed("r", KEPT), Diverged("r", KEPT)])
def test_what_was_recorded_before_a_failure_is_kept(workload: Any, error: Exception) -> None:
    assert workload(raising(error))["samples"] == {"loss": [1.0]}


@pytest.mark.parametrize("value", [math.nan, math.inf, torch.tensor(1.0)])
def test_a_result_that_json_cannot_hold_is_a_crash_and_no_numbers(workload: Any, value: object) -> None:
    reply = workload(lambda trial, context: Measurement(check={"error": value}, samples={"latency_s": [1.0]}))
    assert reply["outcome"] == "crashed"
    assert reply["reason"].startswith("a result that JSON cannot hold: ")
    assert reply["samples"] == reply["check"] == {}


def test_an_unknown_workload_is_a_row_too() -> None:
    reply = child.run(Trial(workload="trainin", device="cpu", problem={}, attention="manual"), Context())
    assert reply["outcome"] == "crashed"
    assert "Did you mean training" in reply["reason"]
