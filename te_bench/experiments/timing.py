"""The only module with a clock. It has three protocols, each part of a trial's identity; every sample is kept.

bench_py   10 burn-in steps, then 20 timed ones (nanoGPT's bench.py). On a GPU one CUDA event between consecutive steps
           and a single wait at the end, so that a sample is the time of a step in a running training loop.
quickstart 50 warm-up iterations, then 50 timed ones (Transformer Engine's quickstart, whose speedometer keeps only the mean
           between two events); the events in between are like bench_py's.
kernel     one call a sample; on a GPU the L2 is flushed before it and the call is queued in advance, so that the device's
           time is measured. Sampling ends when the median is known to 0.5 %.

If trials of several commands take turns on a GPU (`exclusive`), half of the warm-up, in which code is compiled, runs beside
the others. The other half and the timed part have the GPU to themselves.

Inside `looking(look)`, look is called before the first event of every timed block on a GPU and after the wait for its last.
Between the events it would be timed, too.
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
KERNEL_SECONDS = 3.0  # stop after this time even if the interval is wider
KERNEL_HALF_WIDTH = 0.005  # of the median
KERNEL_HELD = 0.05  # longest wait of the GPU for the host, in seconds; in vain if the call itself waits for the GPU
KERNEL_CLOCK = 2e9  # Hz, of a fast GPU's SMs; a slower GPU waits longer


def _unwatched() -> None:
    """Do nothing: the default look."""


_LOOK: ContextVar[Callable[[], None]] = ContextVar("look", default=_unwatched)


@contextlib.contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """Inside, call `look` before and after every block that is timed on a GPU; throttling.Watch.look is such a function.

    It is no argument of the protocols, because a workload need not know who watches the GPU.
    """
    token = _LOOK.set(look)
    try:
        yield
    finally:
        _LOOK.reset(token)


def bench_py(step: Callable[[], object], device: str) -> list[float]:
    """Return the seconds of each of 20 consecutive steps after 10 burn-in steps; reset memory statistics before."""
    return _consecutive(step, device, BENCH_PY_BURN_IN, BENCH_PY_TIMED)


def quickstart(iteration: Callable[[], object], device: str) -> list[float]:
    """Return the seconds of each of 50 consecutive iterations after 50 warm-up ones."""
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
    """Return seconds of calls, L2 cold on a GPU, until the median's 95 % interval is within 0.5 % (3 s, 500 calls)."""
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
    """Return a function that times ten calls between pairs of events, overwriting twice the L2 before each.

    The GPU waits until the ten are queued, 1.5 times as long as the host took for ten unhindered ones. Otherwise a call
    whose launch takes longer than its run would measure its launch (131 us in place of 61; H200).
    """
    l2 = torch.cuda.get_device_properties().L2_cache_size
    flush = torch.empty(2 * l2, dtype=torch.int8, device="cuda")
    look = _LOOK.get()

    def ten(held: int) -> tuple[list[float], float]:
        """Return the seconds of each of ten calls after a wait of `held` cycles, and the seconds of queueing them."""
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
    """Return half the width of the median's distribution-free 95 % interval (order statistics), relative to the median."""
    ordered = sorted(samples)
    low = binomial_quantile(0.025, len(ordered))
    high = min(binomial_quantile(0.975, len(ordered)), len(ordered) - 1)
    return (ordered[high] - ordered[low]) / 2 / statistics.median(ordered)


def binomial_quantile(q: float, n: int) -> int:
    """Return the q-quantile of a binomial distribution with p = 1/2 and n trials.

    It uses exact integers, because importing scipy.special would cost every trial's process 0.2 s.
    """
    sides, k = 1, 0  # of 2^n equally likely throws those with k heads
    below, wanted = sides, Fraction(q) * 2**n
    while below < wanted:
        sides = sides * (n - k) // (k + 1)
        k += 1
        below += sides
    return k
