"""The child's side of a trial: run its workload and return one reply, whatever happens. Imports torch.

This file holds the harness's only broad `except`, which turns any exception into a row.
"""

import gc
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from te_bench import plugins
from te_bench.experiments import exclusive, host, timing, workloads
from te_bench.experiments.measurement import Context, Interrupted, Measurement, NoResult, ran_out
from te_bench.experiments.problems import source_of
from te_bench.experiments.spec import Trial, canonical_json
from te_bench.experiments.throttling import Watch
from te_bench.models.sources import is_changed, lacks
from te_bench.training.parallel import Indivisible


def run(trial: Trial, context: Context) -> dict[str, Any]:
    """Return {"outcome", "reason", "work_s", ...Measurement}; never raise. A trial over ranks gets a process per rank."""
    if trial.problem.get("world") is None:
        return run_one(trial, context)
    from te_bench.experiments import ranks  # imports torch.distributed

    return ranks.run(trial, context, run_one)


def run_one(trial: Trial, context: Context) -> dict[str, Any]:
    """Do the same in this process, which is the whole trial or one of its ranks."""
    started, load = time.perf_counter(), host.cpu_time()
    reason = None
    measurement = Measurement()
    watch = Watch(_gpu)
    try:
        if isinstance(threads := trial.problem.get("threads"), int):  # for torch on a CPU
            torch.set_num_threads(threads)
        if "sha256" in trial.problem and (source := source_of(trial)) and is_changed(source):
            raise Interrupted(
                f"{source.model}: its code has been changed since the trial was planned; run the command again"
            )
        workload = plugins.load(workloads.__name__, trial.workload, "run")
        with exclusive.taking_turns(trial), timing.looking(watch.look):
            measurement = _first_attempt(workload, trial, context) or workload(trial, context)
        outcome = "ok"
    except Exception as error:
        traceback.print_exc()  # into the trial's log
        outcome, reason = classify(error)
        measurement = error.measurement if isinstance(error, NoResult) else measurement
    reply: dict[str, Any] = {
        "outcome": outcome,
        "reason": reason,
        "work_s": time.perf_counter() - started,
        "check": dict(measurement.check),
        "work": dict(measurement.work),
        "samples": {name: list(values) for name, values in measurement.samples.items()},
        "kernels": list(measurement.kernels),
        "device_state": {**watch.state(), **host.load_since(load)},  # while the GPU is still warm
    }
    try:
        canonical_json(reply)
    except (TypeError, ValueError) as error:
        lost: dict[str, Any] = {"check": {}, "work": {}, "samples": {}, "kernels": []}
        return {**reply, **lost, "outcome": "crashed", "reason": f"a result that JSON cannot hold: {error}"}
    return reply


def _first_attempt(
    workload: Callable[[Trial, Context], Measurement], trial: Trial, context: Context
) -> Measurement | None:
    """Return the measurement, or None after an attempt that failed by a torn library, which is removed."""
    try:
        return workload(trial, context)
    except Exception as error:
        if not _removed_torn_library(error):
            raise
    gc.collect()  # a second attempt needs the memory
    return None


def _removed_torn_library(error: Exception) -> bool:
    """Delete the empty library that a killed compiler left in torch.compile's cache, where that is what failed."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    torn = re.search(r"(/[^\n:]+\.so): file too short", str(error))
    library = Path(torn[1]) if torn else Path()
    if (
        not library.is_file()
        or library.stat().st_size
        or not library.resolve().is_relative_to(Path(cache_dir()).resolve())
    ):
        return False
    library.unlink()
    torch._dynamo.reset()
    return True


def classify(error: Exception) -> tuple[str, str]:
    """Return (outcome, reason) of an exception; the reason is one line that a user can act on."""
    text = " ".join(str(error).split())[:500].encode(errors="replace").decode()  # a file's name may have surrogates
    if isinstance(error, NoResult):
        return error.outcome, text
    if isinstance(error, Indivisible):
        return "unsupported", text
    if where := ran_out(error):
        return "oom", f"{where}: {text or 'out of memory'}"
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("te_bench"):
        return "unsupported", lacks(error)
    return "crashed", f"{type(error).__name__}: {text}"


def _gpu() -> str | None:
    """Return the UUID of this process's GPU; None on a CPU, or if CUDA no longer answers."""
    if not torch.cuda.is_initialized():
        return None
    try:
        return f"GPU-{torch.cuda.get_device_properties().uuid}"
    except RuntimeError:  # after an illegal access every CUDA call fails
        return None
