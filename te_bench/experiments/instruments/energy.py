"""Joules of a training step on this process's GPU, by the driver's own counter."""

import math
from collections.abc import Callable

import torch

from te_bench.experiments import environment, exclusive

#: Seconds of steps at least: the counter is brought up to date every 0.1 s or so, which is then 3 % of the energy.
WINDOW_S = 3.0


def of_steps(next_step: Callable[[], None], device: str, latency: float) -> dict[str, float]:
    """{"energy_j": of a step}, {} where nobody counts; latency: seconds of a step, the same in all ranks."""
    if device != "cuda":
        return {}
    uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
    steps = math.ceil(WINDOW_S / latency)
    with exclusive.alone():
        torch.cuda.synchronize()
        before = environment.energy(uuid)
        for _ in range(steps):  # in every rank, whether or not its GPU counts: they compute together
            next_step()
        torch.cuda.synchronize()
        after = environment.energy(uuid)
    return {} if before is None or after is None else {"energy_j": (after - before) / steps}
