"""The faults of a gate's self-test: a call that is slower than it was, leaks or crashes.

Loaded by `fork_server`, the gate's own and the same for both revisions; it imports nothing of te_bench.
"""

import functools
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

LEAKS = 64  # calls that leak: a GPU's memory should last for thousands
TIMED = 20  # calls, of which the median counts

Call = Callable[[], object]
Block = Callable[[int], list[float]]  # the seconds of so many calls


def plant(
    call: Call,
    device: str,
    block_of: Callable[[Call], Block],
    *,
    slower: float = 0.0,
    leak: int = 0,
    crash: bool = False,
) -> Call:
    """The call with a fault: it takes (1 + slower) times as long, keeps `leak` bytes, or crashes.

    block_of(call)(n): the seconds of n calls, by the clock of the gate.
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
    """How long a kernel that spins behind a call must do so to make it longer by that share on the device.

    Less than the share by what such a kernel costs that spins for no time.
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
    """Keep one of the device's processors busy for so long by the device's wall clock, which ticks once in 1 us or oftener.

    Its cycles are no clock: a device at its power cap makes fewer of them.
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
