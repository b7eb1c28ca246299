"""Joules of a training step or a pass of a layer, by the driver's own counter of each GPU."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from te_bench.experiments import environment, exclusive
from te_bench.training.parallel import SINGLE, Parallel

#: Seconds of steps at least: the counter is brought up to date every 0.1 s or so, which is then 3 % of the energy.
WINDOW_S = 3.0


def of_steps(next_step: Callable[[], object], device: str, seconds: float) -> float | None:
    """Joules of a step on this GPU; None where nobody counts. seconds: of a step, the same in all ranks."""
    if device != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
    steps = math.ceil(WINDOW_S / seconds)
    with exclusive.alone():
        torch.cuda.synchronize()
        before = environment.energy(uuid)
        for _ in range(steps):  # in every rank, whether or not its GPU counts: they compute together
            next_step()
        torch.cuda.synchronize()
        after = environment.energy(uuid)
    return None if before is None or after is None else (after - before) / steps


def sample(
    next_step: Callable[[], object], device: str, latency: list[float], parallel: Parallel = SINGLE
) -> dict[str, Any]:
    """{"energy_j": [joules of a step on all GPUs]}, {} where one of them counts none. latency: seconds of timed steps."""
    seconds = max(parallel.of_all(statistics.median(latency)))
    joules = parallel.of_all(of_steps(next_step, device, seconds))
    return {} if None in joules else {"energy_j": [sum(joules)]}
