"""Run gates side by side, each in a process with its own cores and, on a GPU, its own card."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from te_bench.experiments import host
from te_bench.experiments.processes import Ended, ProcessCall, end_with_parent, wait_for_any

Task = TypeVar("Task")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one gate may run: cores (empty: any) and GPU (None: the caller's)."""

    cores: tuple[int, ...] = ()
    gpu: str | None = None


def places(count: int, *, device: str, gpus: Sequence[str] = ()) -> list[Place]:
    """Return `count` places that share no core and, on cuda, no GPU of `gpus`; a single place has the whole machine.

    Raise ValueError if there are fewer cores or GPUs.
    """
    if count < 1:
        raise ValueError(f"--at-once {count}: give 1 or more")
    if count == 1:
        return [Place(gpu=gpus[0] if gpus else None)]
    if device == "cuda" and count > len(gpus):
        raise ValueError(f"--at-once {count}: each gate needs its own GPU, and there are {len(gpus)} here")
    if count > host.cores():
        raise ValueError(f"--at-once {count}: each gate needs its own core, and there are {host.cores()} here")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // count
    chunks = [tuple(cores[each * i : each * (i + 1)]) for i in range(count)]
    return [Place(chunk, gpus[i] if gpus else None) for i, chunk in enumerate(chunks)]


def run_each(
    function: Callable[[Task, Place], Answer], tasks: Iterable[Task], places: Sequence[Place]
) -> Iterator[Answer]:
    """Yield function(task, place) of each task as it completes; with one place, run in this process.

    The function and the tasks must pickle. An error, Ctrl-C, or a caller that stops early ends the other tasks at once.
    Raise what the function raises, and ValueError if a process ends by itself.
    """
    if len(places) == 1:
        for task in tasks:
            yield function(task, places[0])
        return
    context = multiprocessing.get_context("spawn")  # the caller's threads, torch's for instance, do not survive a fork
    waiting, free = list(tasks)[::-1], list(places)
    running: dict[ProcessCall, Place] = {}
    try:
        while waiting or running:
            while waiting and free:
                call = ProcessCall(context, _run_at, free[0], os.getpid(), function, waiting.pop())
                running[call] = free.pop(0)  # before start(): an interrupt during start() must find the call
                call.start()
            for call in wait_for_any(list(running)):
                free.append(running.pop(call))
                call.kill()  # end its leftover children
                try:
                    yield call.result()
                except Ended as end:
                    why = f"a process ended by itself ({end}). If it ran out of memory, lower --at-once"
                    raise ValueError(why) from None
    finally:
        for call in running:
            call.kill()


def _run_at(place: Place, parent: int, function: Callable[[Task, Place], Answer], task: Task) -> Answer:
    os.setsid()  # only the caller handles Ctrl-C
    end_with_parent(parent)
    if place.cores:
        os.sched_setaffinity(0, place.cores)
    return function(task, place)
