"""A call that the host takes longer to launch than the GPU to run."""

import time
from collections.abc import Callable

import torch


def launched_slowly() -> Callable[[], None]:
    """0.5 ms of the host's time, microseconds of the GPU's."""
    x = torch.zeros(16, device="cuda")

    def call() -> None:
        until = time.perf_counter() + 5e-4
        while time.perf_counter() < until:
            pass
        x.add_(1)

    return call
