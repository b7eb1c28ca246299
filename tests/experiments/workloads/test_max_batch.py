"""The bisection against a memory that the test invents, and once against a real limit."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_models import MODULE

from te_bench.experiments import environment
from te_bench.experiments.checks.quantity import Quantity, judge
from te_bench.experiments.measurement import CheckFailed, Context, Interrupted, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import max_batch
from te_bench.models import sources

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {"model": "tiny", "block": 8, "vocab": 64, "padded_vocab": 64, "memory_limit_gib": 2.0}


def trial(**problem: Any) -> Trial:
    problem = {**TINY, **problem}
    return Trial(workload="max_batch", device="cpu", problem=problem, attention="manual", precision="fp32")


def memory(largest: int, base: int, each: int, *, reports: bool) -> Any:
    """An attempt() on a machine whose memory fits `largest`; `reports` whether peaks are known, as on a GPU."""
    total = base + each * largest + each // 2

    def attempt(trial: Trial, batch: int) -> dict[str, Any]:
        fits = batch <= largest
        peak = base + each * batch if fits and reports else None
        peaks = {"peak_allocated_bytes": peak, "peak_reserved_bytes": peak}
        return {"batch": batch, "fits": fits, **peaks, "total_bytes": total if reports else None}

    return attempt


@settings(max_examples=200)
@given(st.integers(1, 5000), st.integers(0, 10**6), st.integers(2, 10**5), st.booleans())
def test_it_finds_the_largest_and_shows_that_one_more_does_not_fit(largest, base, each, reports):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(max_batch, "attempt", memory(largest, base, each, reports=reports))
        found, tries = max_batch.largest(trial())
    assert found == largest
    fits = {one["batch"]: one["fits"] for one in tries}
    assert fits[largest] is True
    assert fits[largest + 1] is False
    assert len(tries) == len(fits) <= 2 * 13 + 2  # no batch is tried twice


def test_knowing_the_peaks_saves_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for reports in (False, True):
        monkeypatch.setattr(max_batch, "attempt", memory(1337, 10**6, 10**4, reports=reports))
        counts.append(len(max_batch.largest(trial())[1]))
    assert counts[1] < counts[0]


def test_it_gives_up_at_a_limit_which_a_cpu_needs_and_nothing_fits_is_out_of_memory(monkeypatch) -> None:
    monkeypatch.setattr(max_batch, "attempt", memory(10**9, 0, 1, reports=False))
    assert max_batch.largest(trial())[0] == max_batch.LIMIT
    monkeypatch.setattr(max_batch, "attempt", memory(10**9, 0, 1, reports=True))  # from 32,768 on eight times as much
    largest, tries = max_batch.largest(trial())
    assert largest == max_batch.LIMIT == tries[-1]["batch"]
    with pytest.raises(Unsupported, match="memory_limit_gib"):
        max_batch.run(trial(memory_limit_gib=None), Context())
    monkeypatch.setattr(max_batch, "attempt", memory(0, 10, 10, reports=False))
    with pytest.raises(MemoryError, match="not even a batch of 1 fits"):
        max_batch.run(trial(), Context())


@pytest.mark.slow
def test_a_try_is_a_real_step_in_a_process_of_its_own_under_a_real_limit() -> None:
    """Two tries as a trial's process makes them, which is small: one that has run other tests may be beyond the limit."""
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawned) as small:
        assert small.submit(max_batch.attempt, trial(), 1).result()["fits"]
        too_large = small.submit(max_batch.attempt, trial(), 1 << 21)  # 2^24 tokens x 64 features x 4 bytes = 4 GiB
        assert not too_large.result()["fits"]


@pytest.mark.parametrize(
    ("gib", "limit", "said"),
    [
        (1.5, None, None),  # a desktop
        (3.0, None, "hold 3.0 GiB of the GPU"),
        (None, None, None),
        (3.0, 8.0, None),
        (9.0, 8.0, "9.0"),
    ],
)
def test_it_searches_only_where_no_other_process_holds_the_memory(monkeypatch, gib, limit, said) -> None:
    def memory_info(handle: object, version: int | None = None) -> SimpleNamespace:
        assert (handle, version) == ("GPU-1", pynvml.nvmlMemory_v2)
        if gib is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(used=int(gib * 2**30))

    monkeypatch.setattr(environment, "visible_gpus", lambda: [{"uuid": "GPU-1", "memory_bytes": 16 * 2**30}])
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory_info)
    begun: list[Trial] = []  # by run, which then holds memory itself

    def verified(of: Trial) -> NoReturn:
        begun.append(of)
        raise MemoryError("enough seen")

    monkeypatch.setattr(max_batch, "verify", verified)
    on_a_gpu = dataclasses.replace(trial(memory_limit_gib=limit), device="cuda")
    with pytest.raises(MemoryError if said is None else Interrupted, match=said or "enough seen"):
        max_batch.run(on_a_gpu, Context())
    assert bool(begun) is (said is None)


def test_a_user_s_model_is_imported_once_for_all_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "imported.py").write_text(f"open({str(tmp_path / 'times')!r}, 'a').write('.')\n{MODULE}")
    source = sources.identify("imported:make")
    assert source is not None
    problem = {**TINY, "memory_limit_gib": 8.0, **source.settings}
    mine = Trial(workload="max_batch", device="cpu", problem=problem, attention="own", precision="fp32")
    (tmp_path / "times").write_text("")
    monkeypatch.setattr(max_batch, "LIMIT", 2)
    assert max_batch.largest(mine)[0] == 2
    assert (tmp_path / "times").read_text() == "."


def test_a_try_that_cannot_run_or_fails_says_why_and_is_not_taken_for_a_full_memory(monkeypatch) -> None:
    with pytest.raises(Unsupported, match="cudnn: needs an NVIDIA GPU"):
        max_batch.attempt(dataclasses.replace(trial(), attention="cudnn"), 1)

    def wrong(*arguments: object, **named: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(max_batch.trial_model, "build", wrong)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        max_batch.attempt(trial(), 1)


def test_a_try_for_which_cublas_has_no_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(max_batch.trial_model, "build", full)
    assert not max_batch.attempt(trial(), 1)["fits"]


def test_a_try_that_is_killed_does_not_fit_where_that_was_for_memory_and_is_else_interrupted(monkeypatch) -> None:
    monkeypatch.setattr(max_batch.trial_model, "build", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    kills = iter([3, 3, 3, 4])
    monkeypatch.setattr(max_batch, "oom_kills", lambda: next(kills))
    with pytest.raises(Interrupted, match="rerun"):
        max_batch.attempt(trial(), 1)
    assert not max_batch.attempt(trial(), 1)["fits"]


def test_the_configuration_is_checked_before_its_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_batch, "attempt", memory(3, 10, 10, reports=False))
    flash = dataclasses.replace(trial(), attention="flash")
    found = max_batch.run(flash, Context())
    assert found.samples["max_batch"] == [3.0]
    assert any("flash_attention" in kernel for kernel in found.kernels)
    assert found.check["quantities"][0]["name"] == "loss"

    assert "capped" not in found.work
    monkeypatch.setattr(max_batch, "LIMIT", 2)
    assert max_batch.run(flash, Context()).work["capped"] is True

    monkeypatch.setattr(max_batch.training_step, "check_step", lambda *a: judge("x", [Quantity("loss", 2, 1)]))
    with pytest.raises(CheckFailed, match="loss: error 2 > 1"):
        max_batch.run(flash, Context())
