"""Measure the joules of a training step or a layer's pass, by the driver's energy counter of each GPU."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from te_bench.experiments import environment, exclusive
from te_bench.experiments.measurement import CheckFailed
from te_bench.training.parallel import SINGLE, Parallel

#: Measure at least so many seconds of steps: the counter updates about every 0.1 s, which is 3 % of this window.
WINDOW_S = 3.0
#: Times the power limit, which a GPU keeps on average over a second or so.
ABOVE = 1.25


def of_steps(next_step: Callable[[], object], device: str, seconds: float) -> float | None:
    """Return the joules of a step on this GPU; None without a counter. seconds: of a step, the same in all ranks.

    Raises CheckFailed for a counter that stood still, or that says more than the power limit lets a GPU take.
    """
    if device != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
    steps = math.ceil(WINDOW_S / seconds)
    limit = next((gpu["power_limit_w"] for gpu in environment.nvidia_gpus() if gpu["uuid"] == uuid), None)
    with exclusive.alone():
        torch.cuda.synchronize()
        before, began = environment.energy(uuid), time.perf_counter()
        for _ in range(steps):  # in every rank, also without a counter: all ranks compute together
            next_step()
        torch.cuda.synchronize()
        after, elapsed = environment.energy(uuid), time.perf_counter() - began
    if before is None or after is None:
        return None
    joules = after - before
    if joules <= 0 or (limit is not None and joules > ABOVE * limit * elapsed):
        bound = "more than 0" if limit is None else f"0 to {ABOVE * limit * elapsed:.6g} J, by its power limit"
        raise CheckFailed(f"the GPU's counter says {joules:.6g} J in {elapsed:.3g} s: {bound}")
    return joules / steps


def sample(
    next_step: Callable[[], object], device: str, latency: list[float], parallel: Parallel = SINGLE
) -> dict[str, Any]:
    """Return {"energy_j": [joules of a step on all GPUs]}, {} if a GPU has no counter. latency: seconds of timed steps."""
    seconds = max(parallel.of_all(statistics.median(latency)))
    joules = parallel.of_all(of_steps(next_step, device, seconds))
    return {} if None in joules else {"energy_j": [sum(joules)]}
