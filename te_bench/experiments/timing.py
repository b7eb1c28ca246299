"""The only owner of a clock. Three protocols, each part of a trial's identity; every sample is kept.

bench_py   10 burn-in steps, then 20 timed ones (nanoGPT's bench.py). On a GPU one CUDA event between consecutive steps
           and a single wait at the end, so that a sample is what a step costs in a running training loop.
quickstart 50 warm-up iterations, then 50 timed ones (Transformer Engine's quickstart, whose speedometer keeps the mean
           between two events alone); the events in between are bench_py's.
kernel     one call a sample, on a GPU with the L2 flushed before it and the host ahead, so that it is the device's time,
           until the median is known to 0.5 %.

Where trials of several commands take turns on a GPU (`exclusive`), half of the warm-up, in which code is compiled, runs
beside the others. The other half and what is timed have the GPU to themselves.

Inside `looking(look)` every timed block on a GPU has a look before its first event and one after the wait for its last:
between the events of a running stream it would be timed with it.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from fractions import Fraction

import torch

from te_bench.experiments import exclusive

BENCH_PY_BURN_IN, BENCH_PY_TIMED = 10, 20
QUICKSTART_WARM_UP, QUICKSTART_TIMED = 50, 50

KERNEL_WARMUP = 10
KERNEL_MIN, KERNEL_MAX = 30, 500  # samples
KERNEL_SECONDS = 3.0  # stop there even when the interval is still wider
KERNEL_HALF_WIDTH = 0.005  # of the median
KERNEL_HELD = 0.05  # seconds that a GPU waits for the host at most; for a call that itself waits for the GPU, in vain
KERNEL_CLOCK = 2e9  # Hz, that of a fast GPU's processors: a slower one waits longer


def _unwatched() -> None:
    """Where nobody asked for looks."""


_LOOK: ContextVar[Callable[[], None]] = ContextVar("look", default=_unwatched)


@contextlib.contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """Have every block that is timed on a GPU in here looked at, before and after it; throttling.Watch.look is such a look.

    It is no argument of the protocols: a workload says what to time and need not know who watches the GPU.
    """
    token = _LOOK.set(look)
    try:
        yield
    finally:
        _LOOK.reset(token)


def bench_py(step: Callable[[], object], device: str) -> list[float]:
    """Seconds of each of 20 consecutive steps after 10 burn-in steps; the caller resets memory statistics before."""
    return _consecutive(step, device, BENCH_PY_BURN_IN, BENCH_PY_TIMED)


def quickstart(iteration: Callable[[], object], device: str) -> list[float]:
    """Seconds of each of 50 consecutive iterations after 50 warm-up ones."""
    return _consecutive(iteration, device, QUICKSTART_WARM_UP, QUICKSTART_TIMED)


def _consecutive(step: Callable[[], object], device: str, warm_up: int, timed: int) -> list[float]:
    for _ in range(warm_up // 2):
        step()
    with exclusive.alone():
        for _ in range(warm_up - warm_up // 2):
            step()
        if device != "cuda":
            edges = [time.perf_counter()]
            for _ in range(timed):
                step()
                edges.append(time.perf_counter())
            return [after - before for before, after in itertools.pairwise(edges)]
        torch.cuda.synchronize()
        _LOOK.get()()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        _LOOK.get()()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def kernel(call: Callable[[], object], device: str) -> list[float]:
    """Seconds of single calls, L2 cold on a GPU, until the median's 95 % interval is within 0.5 % (or 3 s, or 500 calls)."""
    for _ in range(KERNEL_WARMUP):
        call()
    with exclusive.alone():
        sample = _sample_cuda(call) if device == "cuda" else _sample_cpu(call)
        started = time.perf_counter()
        samples: list[float] = []
        while len(samples) < KERNEL_MAX:
            samples += sample()
            if len(samples) >= KERNEL_MIN and _half_width(samples) <= KERNEL_HALF_WIDTH:
                break
            if len(samples) >= KERNEL_MIN and time.perf_counter() - started > KERNEL_SECONDS:
                break
        return samples


def _sample_cpu(call: Callable[[], object]) -> Callable[[], list[float]]:
    def sample() -> list[float]:
        start = time.perf_counter()
        call()
        return [time.perf_counter() - start]

    return sample


def _sample_cuda(call: Callable[[], object]) -> Callable[[], list[float]]:
    """Ten calls between pairs of events; a buffer of twice the L2 is overwritten before each.

    The GPU waits until the ten are queued, half as long again as the host took for ten that nobody held up: without, a
    call that is launched more slowly than it runs is as slow as its launches (131 us in place of 61; H200).
    """
    l2 = torch.cuda.get_device_properties().L2_cache_size
    flush = torch.empty(2 * l2, dtype=torch.int8, device="cuda")
    look = _LOOK.get()

    def ten(held: int) -> tuple[list[float], float]:
        """Their seconds, after so many cycles' wait, and those of queueing them."""
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(10)]
        torch.cuda._sleep(held)
        began = time.perf_counter()
        for before, after in pairs:
            flush.zero_()
            before.record()
            call()
            after.record()
        queueing = time.perf_counter() - began
        torch.cuda.synchronize()
        look()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs], queueing

    look()
    _, queueing = ten(0)
    cycles = int(min(1.5 * queueing, KERNEL_HELD) * KERNEL_CLOCK)
    return lambda: ten(cycles)[0]


def _half_width(samples: list[float]) -> float:
    """Half the width of the median's distribution-free 95 % interval (order statistics), relative to the median."""
    ordered = sorted(samples)
    low = binomial_quantile(0.025, len(ordered))
    high = min(binomial_quantile(0.975, len(ordered)), len(ordered) - 1)
    return (ordered[high] - ordered[low]) / 2 / statistics.median(ordered)


def binomial_quantile(q: float, n: int) -> int:
    """The q-quantile of how many of n fair coins show heads: of a binomial distribution with p = 1/2.

    In integers, which are exact: scipy.special would take every trial's process 0.2 s to import.
    """
    sides, k = 1, 0  # of 2^n equally likely throws those with k heads
    below, wanted = sides, Fraction(q) * 2**n
    while below < wanted:
        sides = sides * (n - k) // (k + 1)
        k += 1
        below += sides
    return k
