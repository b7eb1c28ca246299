"""Plant the faults of a gate's self-test: a call that is slower, leaks or crashes.

`fork_server` loads this file of the gate's te_bench for both revisions; the file imports nothing of te_bench.
"""

import functools
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

LEAKS = 64  # calls that leak, so that a GPU's memory lasts for thousands of calls
TIMED = 20  # calls, of which the median is taken

Call = Callable[[], object]
Block = Callable[[int], list[float]]  # seconds of each of so many calls


def plant(
    call: Call,
    device: str,
    block_of: Callable[[Call], Block],
    *,
    slower: float = 0.0,
    leak: int = 0,
    crash: bool = False,
) -> Call:
    """Return the call with a fault: it takes (1 + slower) times as long, leaks `leak` bytes, or crashes.

    block_of(call)(n) returns the seconds of each of n calls, by the gate's clock.
    """
    import torch

    kept: list[object] = []

    def faulty() -> object:
        begin = time.perf_counter()
        found = call()
        if crash:
            os.kill(os.getpid(), signal.SIGSEGV)
        if leak and len(kept) < LEAKS:
            kept.append(torch.ones(leak, dtype=torch.int8, device=device))
        if slower and device == "cuda":
            spin(longer)
        until = begin + (1 + slower) * (time.perf_counter() - begin)
        while slower and device != "cuda" and time.perf_counter() < until:
            pass
        return found

    longer = _seconds_of(call, slower, block_of) if slower and device == "cuda" else 0.0
    return faulty


def _seconds_of(call: Call, share: float, block_of: Callable[[Call], Block]) -> float:
    """Return how many seconds a kernel must spin after a call to make the call longer by `share` on the device.

    The cost of launching such a kernel is subtracted.
    """

    def followed() -> None:
        call()
        spin(0.0)

    def seconds(timed: Call) -> float:
        for _ in range(3):
            timed()
        return statistics.median(block_of(timed)(TIMED))

    alone, launched = seconds(call), seconds(followed)
    return max(share * alone - max(launched - alone, 0.0), 0.0)


def spin(seconds: float) -> None:
    """Keep one of the device's SMs busy for so many seconds by the device's wall clock, which ticks at least every 1 us.

    Cycles would be no clock: a device at its power cap runs fewer cycles a second.
    """
    _spin_kernel()[(1,)](round(seconds * 1e9), num_warps=1)


@functools.cache
def _spin_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["nanoseconds"])
    def spin_kernel(nanoseconds):  # type: ignore[no-untyped-def]
        now = tl.extra.cuda.globaltimer()
        until = now + nanoseconds
        while now < until:
            now = tl.extra.cuda.globaltimer()

    return spin_kernel
