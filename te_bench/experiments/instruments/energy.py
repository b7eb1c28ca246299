"""Measure the joules of a training step or a layer's pass, by the driver's energy counter of each GPU."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from te_bench.experiments import environment, exclusive
from te_bench.training.parallel import SINGLE, Parallel

#: Measure at least so many seconds of steps: the counter updates about every 0.1 s, which is 3 % of this window.
WINDOW_S = 3.0


def of_steps(next_step: Callable[[], object], device: str, seconds: float) -> float | None:
    """Return the joules of a step on this GPU; None without a counter. seconds: of a step, the same in all ranks."""
    if device != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
    steps = math.ceil(WINDOW_S / seconds)
    with exclusive.alone():
        torch.cuda.synchronize()
        before = environment.energy(uuid)
        for _ in range(steps):  # in every rank, also without a counter: all ranks compute together
            next_step()
        torch.cuda.synchronize()
        after = environment.energy(uuid)
    return None if before is None or after is None else (after - before) / steps


def sample(
    next_step: Callable[[], object], device: str, latency: list[float], parallel: Parallel = SINGLE
) -> dict[str, Any]:
    """Return {"energy_j": [joules of a step on all GPUs]}, {} if a GPU has no counter. latency: seconds of timed steps."""
    seconds = max(parallel.of_all(statistics.median(latency)))
    joules = parallel.of_all(of_steps(next_step, device, seconds))
    return {} if None in joules else {"energy_j": [sum(joules)]}
