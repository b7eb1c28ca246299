"""Measure a trial's peak memory since its check."""

import ctypes
import gc
import resource
from pathlib import Path

import torch

from te_bench.training.step import TrainStep

_PEAK = Path("/proc/self/clear_refs")


def reset(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif _PEAK.exists():
        # glibc keeps up to hundreds of MB that the check has freed, which would count as a checkpointed step's memory.
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
        _PEAK.write_text("5")  # reset the peak resident set, the check's, to the present one (proc(5))


def peak(device: str, step: TrainStep | None = None) -> dict[str, list[float]]:
    """Return peak allocated and reserved bytes since `reset`; on a CPU the peak resident bytes."""
    if device != "cuda":
        return {"peak_rss_bytes": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0]}
    reserved = {"peak_reserved_bytes": [float(torch.cuda.max_memory_reserved())]}
    if step is not None and step.mode == "compile-reduce-overhead":
        return reserved  # torch captured its graphs before `reset`; replays allocate nothing
    captured = step.captured_peak_bytes if step else None
    return {"peak_allocated_bytes": [float(max(torch.cuda.max_memory_allocated(), captured or 0))], **reserved}
