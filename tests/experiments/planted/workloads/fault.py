"""Do what problem["model"] names, for real. Context.cache is a folder for what one run leaves for the next."""

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from te_bench.experiments.measurement import Context, Measurement
from te_bench.experiments.spec import Trial

MARK = "TE_BENCH_TEST_RUN"  # as tests/driving.py sets it
TIMED = Measurement(samples={"latency_s": [0.5]})
LOCKS: list[object] = []
MODELS = (
    "te_bench.models.zoo.gpt",
    "te_bench.experiments.checks.training_step",
    "te_bench.kernels.adamw.backends.triton",
)
FOUND = {"models": sys.modules.keys() >= set(MODELS), "frozen": gc.get_freeze_count()}  # in a child that begins


def run(trial: Trial, context: Context) -> Measurement:
    assert context.cache is not None
    name = str(trial.problem["model"]).replace("-", "_")
    return globals()[name](trial, context.cache)


def sound(trial: Trial, cache: Path) -> Measurement:
    return dataclasses.replace(TIMED, work=FOUND)


sound_after = sound


def lock(trial: Trial, cache: Path) -> Measurement:
    """As tqdm takes one, and so torch.compile: shared by processes, never given back."""
    LOCKS.append(multiprocessing.RLock())
    return TIMED


def segfault(trial: Trial, cache: Path) -> Measurement:
    ctypes.string_at(0)
    return TIMED


def abort(trial: Trial, cache: Path) -> Measurement:
    os.abort()


def host_memory(trial: Trial, cache: Path) -> Measurement:
    resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))
    torch.ones(2**33, dtype=torch.uint8)
    return TIMED


def python_memory(trial: Trial, cache: Path) -> Measurement:
    resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))
    bytearray(2**33)
    return TIMED


def missing_package(trial: Trial, cache: Path) -> Measurement:
    importlib.import_module("a_package_that_is_not_there")
    return TIMED


def missing_submodule(trial: Trial, cache: Path) -> Measurement:
    importlib.import_module("numpy.a_part_that_is_not_there")
    return TIMED


def wrong_kernel(trial: Trial, cache: Path) -> Measurement:
    from te_bench.experiments.checks.what_ran import require_attention  # 3 s, in every child that imports it
    from te_bench.experiments.instruments.profiling import Seen

    return require_attention(trial, Seen(["aten::_scaled_dot_product_flash_attention_for_cpu"]), TIMED)


def killed_once(trial: Trial, cache: Path) -> Measurement:
    """As a user or the system would: by a SIGKILL that another process sends."""
    marker = cache / "killed"
    if not marker.exists():
        marker.touch()
        subprocess.run(["kill", "-KILL", str(os.getpid())], check=True)
        time.sleep(60)
    return TIMED


def exit(trial: Trial, cache: Path) -> Measurement:
    os._exit(3)


def nan_sample(trial: Trial, cache: Path) -> Measurement:
    return Measurement(samples={"latency_s": [math.nan]})


def raises(trial: Trial, cache: Path) -> Measurement:
    raise KeyError("<b>not\nthere</b>")


def no_log(trial: Trial, cache: Path) -> Measurement:
    Path("/proc/self/fd/2").readlink().unlink()
    raise KeyError("its log is gone")


def hang(trial: Trial, cache: Path) -> Measurement:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"])
    while True:
        time.sleep(1)


def hang_holding_gil(trial: Trial, cache: Path) -> Measurement:
    ctypes.PyDLL(None).sleep(1000)  # PyDLL, unlike CDLL, does not let go of the interpreter
    return TIMED


def nobody_else(trial: Trial, cache: Path) -> Measurement:
    """No child of an earlier trial of this run is alive."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "sleep" and process.environ().get(MARK) == os.environ[MARK]:
                raise AssertionError(f"{process} is still alive")
    return TIMED


def gpu_memory(trial: Trial, cache: Path) -> Measurement:
    torch.empty(2**46, dtype=torch.uint8, device="cuda")
    return TIMED


def gpu_assert(trial: Trial, cache: Path) -> Measurement:
    """An index far out of range: the context is lost, and every later call fails."""
    torch.zeros(4, device="cuda")[torch.tensor([10**9], device="cuda")]
    torch.cuda.synchronize()
    return TIMED


def gpu_sound(trial: Trial, cache: Path) -> Measurement:
    assert torch.ones(4, device="cuda").sum().item() == 4
    return TIMED


gpu_sound_after = gpu_sound
