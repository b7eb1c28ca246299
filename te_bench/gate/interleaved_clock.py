"""The clock of a live gate, in place of the revision's own: it times a call when the gate asks for it.

`fork_server` loads this file of the gate's te_bench for both revisions; the file imports nothing of te_bench.
"""

import contextlib
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_bench.gate.revision_process import Lines

EVENTS = 10  # pairs of CUDA events recorded before each synchronisation, when the L2 is flushed
HELD = 10**8  # cycles: the longest that the device waits for the host, 0.05 s; a call may itself wait for the device
CLOCK = 2e9  # Hz, of a fast GPU's SMs; a slower GPU waits longer

Call = Callable[[], object]
Block = Callable[[int], list[float]]  # seconds of each of so many calls


def make_clock(
    lines: "Lines", name: str, warm_up: int, core: int | None, plant: Callable[..., Call] | None
) -> Callable[[Call, str], list[float]]:
    """Return a clock that times a call when the gate asks for it, and returns all the seconds that it timed.

    plant(call, device, the function that makes a call's block) returns the call with a planted fault; None: no fault.
    """

    def timed(call: Call, device: str) -> list[float]:
        block_of = functools.partial(cuda_block, flush=name == "kernel") if device == "cuda" else cpu_block
        call = plant(call, device, block_of) if plant else call
        for _ in range(warm_up):
            call()
        block = block_of(call)
        kept: list[float] = []
        with _pinned_to(core):
            lines.send(ready=name)
            while not (turn := lines.receive()).get("stop"):
                before = _read_clocks(device)
                seconds = list(time_turn(block, turn))
                after = _read_clocks(device)
                if "calls" in turn:
                    kept += seconds
                known = [hz for hz in (before[1], after[1]) if hz]
                lines.send(seconds=seconds, throttle=before[0] | after[0], sm_clock_hz=min(known, default=None))
        return kept

    return timed


@contextlib.contextmanager
def _pinned_to(core: int | None) -> Iterator[None]:
    """Pin this thread to one core if the system allows it; None: do not pin."""
    if core is None:
        yield
        return
    cores = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # the core may have been denied since
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the earlier cores may have been denied too
            os.sched_setaffinity(0, cores)


def time_turn(block: Block, turn: dict[str, Any]) -> Iterator[float]:
    """Yield the seconds of the number of calls asked for, or of calls until the time asked for has passed."""
    if "calls" in turn:
        yield from block(turn["calls"])
        return
    until = time.perf_counter() + turn["seconds"]
    while True:
        yield from block(1)
        if time.perf_counter() >= until:
            return


def cpu_block(call: Call) -> Block:
    """Return the function that times calls: wall seconds, less the time in which this thread waited for a busy core.

    Waits while other threads of this process computed still count. Linux reports a thread's waits; other systems give
    wall seconds.
    """
    try:
        waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY)  # the timed thread must open it
    except OSError:
        waits = None

    def waited() -> int:
        return int(os.pread(waits, 64, 0).split()[1]) if waits is not None else 0

    def edge() -> tuple[float, float, float]:
        """Return the wall clock, the wait so far and other threads' CPU time; read again after an interruption."""
        for _ in range(3):
            wait, wall, others = waited(), time.perf_counter(), time.process_time() - time.thread_time()
            if waited() == wait:
                break
        return wall, wait * 1e-9, others

    def block(calls: int) -> list[float]:
        edges = [edge()]
        for _ in range(calls):
            call()
            edges.append(edge())
        steps = ([b - a for a, b in zip(before, after, strict=True)] for before, after in itertools.pairwise(edges))
        return [wall - min(max(wait - others, 0.0), 0.99 * wall) for wall, wait, others in steps]

    return block


def cuda_block(call: Call, *, flush: bool) -> Block:
    """Return the function that times calls: seconds between CUDA events around each call.

    flush: time a kernel, with the L2 overwritten before each call. The device is held until EVENTS calls are queued, so
    that a call whose launch takes longer than its run is not timed by its launch.
    """
    import torch

    size = 2 * torch.cuda.get_device_properties().L2_cache_size if flush else 0
    l2 = torch.empty(size, dtype=torch.int8, device="cuda")

    def queued(calls: int, held: int) -> tuple[list[float], float]:
        """Return seconds of each call after a wait of `held` cycles, and the seconds that queueing them took."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        torch.cuda.synchronize()
        if held:
            torch.cuda._sleep(held)
        began = time.perf_counter()
        for before, after in events:
            if flush:
                l2.zero_()
            before.record()
            call()
            after.record()
        queueing = time.perf_counter() - began
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in events], queueing

    most = EVENTS if flush else sys.maxsize
    held_a_call = 1.5 * queued(EVENTS, 0)[1] / EVENTS * CLOCK if flush else 0.0

    def block(calls: int) -> list[float]:
        found: list[float] = []
        while calls > len(found):
            now = min(calls - len(found), most)
            found += queued(now, min(round(now * held_a_call), HELD))[0]
        return found

    return block


def _read_clocks(device: str) -> tuple[int, float | None]:
    """Return (nvml.h's bits of clock throttle reasons, SM clock in Hz); (0, None) if unknown."""
    if device != "cuda":
        return 0, None
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        return (
            pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1e6,
        )
    except pynvml.NVMLError:
        return 0, None
