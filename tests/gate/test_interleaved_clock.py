"""The clock of a live gate: what it counts, what it does not, and that no call takes less than no time."""

import errno
import itertools
import multiprocessing
import os
import statistics
import threading
import time
from pathlib import Path

import pytest
from launches import launched_slowly

from te_bench.gate import interleaved_clock

linux = pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel counts no waits")


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _busy() -> None:
    while True:
        pass


@linux
def test_waiting_for_a_core_is_not_counted() -> None:
    """Three processes on one core: on the wall a call takes three times as long. Half may be disturbed by the host."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [multiprocessing.get_context("fork").Process(target=_busy, daemon=True) for _ in range(2)]
    try:
        for other in others:
            other.start()
        begin = time.perf_counter()
        seconds = interleaved_clock.cpu_block(lambda: work(0.05))(8)
        wall = time.perf_counter() - begin
    finally:
        for other in others:
            other.kill()
            other.join()
        os.sched_setaffinity(0, cores)
    assert wall > 2 * 8 * 0.05
    assert sum(sorted(seconds)[:4]) == pytest.approx(4 * 0.05, rel=0.15)


@linux
def test_waits_for_its_own_threads_count() -> None:
    """A call whose other thread takes the core away has made itself slower."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    try:
        thread.start()
        begin = time.perf_counter()
        seconds = interleaved_clock.cpu_block(lambda: work(0.05))(3)
        wall = time.perf_counter() - begin
    finally:
        stop.set()
        thread.join()
        os.sched_setaffinity(0, cores)
    assert sum(seconds) > 1.5 * 3 * 0.05
    assert sum(seconds) <= wall


def test_sleeping_counts_and_calls_come_in_order() -> None:
    naps = itertools.cycle([0.01, 0.03])
    seconds = interleaved_clock.cpu_block(lambda: time.sleep(next(naps)))(4)
    assert [s > 0.02 for s in seconds] == [False, True, False, True]


def test_no_call_takes_less_than_no_time() -> None:
    assert all(s > 0 for s in interleaved_clock.cpu_block(lambda: None)(20000))


def test_a_turn_by_seconds_is_one_call_at_least() -> None:
    block = interleaved_clock.cpu_block(lambda: time.sleep(0.02))
    assert len(list(interleaved_clock.time_turn(block, {"seconds": 0.001}))) == 1
    assert len(list(interleaved_clock.time_turn(interleaved_clock.cpu_block(lambda: None), {"calls": 5}))) == 5


class Asked:
    """The gate's end of a revision's lines: three turns, then it stops."""

    def __init__(self) -> None:
        self.messages = iter([{"seconds": 1e-3}, {"calls": 2}, {"calls": 1}, {"stop": True}])
        self.sent: list[dict[str, object]] = []

    def receive(self) -> dict[str, object]:
        return next(self.messages)

    def send(self, **message: object) -> None:
        self.sent.append(message)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a process has no cores of its own")
@pytest.mark.parametrize("pinned", [True, False])
def test_turns_are_taken_on_the_core_that_the_gate_says(pinned: bool) -> None:
    cores = os.sched_getaffinity(0)
    core = max(cores)
    seen = []
    lines = Asked()
    clock = interleaved_clock.make_clock(lines, "bench_py", 1, core if pinned else None, None)  # type: ignore[arg-type]
    kept = clock(lambda: seen.append(os.sched_getaffinity(0)), "cpu")
    assert len(kept) == 3  # the turn that was tried by seconds does not count
    assert seen[0] == cores  # it warms up where it was built
    assert seen[1:] == [{core} if pinned else cores] * (len(seen) - 1)
    assert os.sched_getaffinity(0) == cores
    assert [sorted(message) for message in lines.sent] == [["ready"], *[["seconds", "sm_clock_hz", "throttle"]] * 3]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a process has no cores of its own")
@pytest.mark.parametrize("allowed", [0, 1])
def test_turns_are_taken_where_no_core_may_be_chosen_or_all_are_taken_away(allowed, monkeypatch):
    asked: list[set[int]] = []

    def choose(pid: int, cores: set[int]) -> None:
        asked.append(cores)
        if len(asked) > allowed:
            raise PermissionError if not allowed else OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", choose)
    core = max(os.sched_getaffinity(0))
    clock = interleaved_clock.make_clock(Asked(), "bench_py", 1, core, None)  # type: ignore[arg-type]
    assert len(clock(lambda: None, "cpu")) == 3
    assert asked == [{core}, os.sched_getaffinity(0)]


@pytest.mark.gpu
@pytest.mark.alone  # while others have the GPU, a queue of calls gathers that then run at once
def test_a_kernel_that_is_launched_slowly_is_not_as_slow_as_its_launches() -> None:
    slowly = launched_slowly()
    assert statistics.median(interleaved_clock.cuda_block(slowly, flush=True)(25)) < 1e-4
    assert statistics.median(interleaved_clock.cuda_block(slowly, flush=False)(25)) > 4e-4
