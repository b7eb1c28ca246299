"""Check, then time: errors against their limits, and the kernels that ran against those that were asked for."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from te_bench.experiments.measurement import CheckFailed, Measurement
from te_bench.experiments.spec import Trial
from te_bench.kernels import attention


@dataclasses.dataclass(frozen=True, slots=True)
class Quantity:
    """One thing that was compared: its error against the reference and what it may be."""

    name: str
    error: float
    limit: float

    @property
    def wrong(self) -> bool:
        return not self.error <= self.limit  # NaN is not <=

    def to_json(self) -> dict[str, Any]:
        """JSON has no NaN: what is not a finite number is null."""
        error, limit = (x if math.isfinite(x) else None for x in (self.error, self.limit))
        return {"name": self.name, "error": error, "limit": limit}


def judge(reference: str, quantities: list[Quantity]) -> dict[str, Any]:
    """The check of a record; raises CheckFailed, naming the worst quantity, when one exceeds its limit."""
    check = {"reference": reference, "quantities": [q.to_json() for q in quantities]}
    wrong = [q for q in quantities if q.wrong]
    if wrong:
        worst = max(wrong, key=lambda q: q.error / (q.limit or 1e-30) if math.isfinite(q.error) else math.inf)
        reason = f"{worst.name}: error {worst.error:.3g} > {worst.limit:.3g}"
        others = f" ({len(wrong)} of {len(quantities)} quantities are wrong)"
        raise CheckFailed(reason + others, Measurement(check=check))
    return check


def kernels_seen(call: Callable[[], object], device: str) -> list[str]:
    """Names of the attention and FP8 operators and of every GPU kernel that one call runs, longest total time first."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as profiler:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    seconds: dict[str, float] = {}
    event: FunctionEvent
    for event in profiler.events() or []:
        on_gpu = "CUDA" in str(event.device_type)
        if on_gpu or "attention" in event.name or "scaled_mm" in event.name:
            seconds[event.name] = seconds.get(event.name, 0.0) + (event.device_time if on_gpu else 0.0)
    return [name[:200] for name in sorted(seconds, key=lambda name: -seconds[name])]


def require_kernels(trial: Trial, seen: list[str], measurement: Measurement) -> Measurement:
    """The measurement with its kernels; raises CheckFailed, without timings, when another attention ran."""
    reason = attention.wrong_kernel(trial.attention, trial.device, seen, eager=trial.mode == "eager")
    if reason:
        raise CheckFailed(reason, dataclasses.replace(measurement, samples={}, kernels=seen))
    return dataclasses.replace(measurement, kernels=seen)
