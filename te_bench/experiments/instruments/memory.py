"""The most memory that a trial takes, since its check."""

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
        # What the check has freed glibc keeps, up to hundreds of MB, and a step by checkpointed blocks seems to take more.
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
        _PEAK.write_text("5")  # forget the largest resident set so far (proc(5)): it was the check's


def peak(device: str, step: TrainStep | None = None) -> dict[str, list[float]]:
    """Bytes: allocated and reserved at their peak since `reset`; on a CPU the largest resident set since then."""
    if device != "cuda":
        return {"peak_rss_bytes": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0]}
    reserved = {"peak_reserved_bytes": [float(torch.cuda.max_memory_reserved())]}
    if step is not None and step.mode == "compile-reduce-overhead":
        return reserved  # torch's own graphs were captured before, and their replays allocate nothing
    captured = step.captured_peak_bytes if step else None
    return {"peak_allocated_bytes": [float(max(torch.cuda.max_memory_allocated(), captured or 0))], **reserved}
