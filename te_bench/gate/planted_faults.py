"""The faults of a gate's self-test: a call that is slower than it was, leaks or crashes.

Loaded by `fork_server`, the gate's own and the same for both revisions; it imports nothing of te_bench.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable

LEAKS = 64  # calls that leak: a GPU's memory should last for thousands
TIMED = 20  # calls, of which the median counts
CLOCK = 2e9  # Hz, that of a fast device's processors, as interleaved_clock has it, which cannot be imported here

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
            torch.cuda._sleep(spins)
        until = begin + (1 + slower) * (time.perf_counter() - begin)
        while slower and device != "cuda" and time.perf_counter() < until:
            pass
        return found

    spins = _cycles_of(call, slower, block_of) if slower and device == "cuda" else 0
    return faulty


def _cycles_of(call: Call, share: float, block_of: Callable[[Call], Block]) -> int:
    """For how many cycles torch's spinning kernel, put behind a call, makes it longer by that share on the device.

    Timed behind the call: a device at its power cap has other clocks than one that spins alone.
    """
    import torch

    def seconds(spins: int | None) -> float:
        def followed() -> None:
            call()
            if spins is not None:
                torch.cuda._sleep(spins)

        for _ in range(3):
            followed()
        return statistics.median(block_of(followed)(TIMED))

    alone = seconds(None)
    many = max(round(10 * share * alone * CLOCK), 1)
    launched, spinning = seconds(0), seconds(many)
    a_cycle = max(spinning - launched, 0.1 * many / CLOCK) / many
    return max(round((share * alone - max(launched - alone, 0.0)) / a_cycle), 0)
