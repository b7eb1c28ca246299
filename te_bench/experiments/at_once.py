"""Measurements side by side: each in a process that has cores, and on a GPU a card, of its own."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

from te_bench.experiments import host, origin

Task = TypeVar("Task")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one measurement may run: on which cores (empty: on any), on which GPU (None: as the caller would)."""

    cores: tuple[int, ...] = ()
    gpu: str | None = None


def places(count: int, *, device: str, gpus: Sequence[str] = ()) -> list[Place]:
    """`count` places that share no core and, on cuda, none of the `gpus`; one is the whole machine's.

    Raises ValueError for more than there are cores or GPUs.
    """
    if count < 1:
        raise ValueError(f"--at-once {count}: give 1 or more")
    if count == 1:
        return [Place(gpu=gpus[0] if gpus else None)]
    if device == "cuda" and count > len(gpus):
        raise ValueError(f"--at-once {count}: each needs a GPU of its own, and there are {len(gpus)} here")
    if count > host.cores():
        raise ValueError(f"--at-once {count}: each needs a core of its own, and there are {host.cores()} here")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // count
    chunks = [tuple(cores[each * i : each * (i + 1)]) for i in range(count)]
    return [Place(chunk, gpus[i] if gpus else None) for i, chunk in enumerate(chunks)]


def each(function: Callable[[Task, Place], Answer], tasks: Iterable[Task], where: Sequence[Place]) -> Iterator[Answer]:
    """function(task, place) of each task, as it is done; in this process where there is one place.

    The function and the tasks must pickle. An error, Ctrl-C, or a caller that wants no more ends the others at once. Raises
    what the function raises, and ValueError when a process ends by itself.
    """
    if len(where) == 1:
        for task in tasks:
            yield function(task, where[0])
        return
    context = multiprocessing.get_context("spawn")  # threads of the caller's, of torch's say, would not survive a fork
    others = multiprocessing.active_children()  # of the caller's
    free = context.SimpleQueue()
    for place in where:
        free.put(place)
    with concurrent.futures.ProcessPoolExecutor(
        len(where), mp_context=context, initializer=_take, initargs=(free, os.getpid())
    ) as pool:
        try:
            for done in concurrent.futures.as_completed([pool.submit(_at_its_place, function, task) for task in tasks]):
                yield done.result()
        except BaseException as error:  # else the pool would wait for the others
            for process in set(multiprocessing.active_children()).difference(others):
                process.kill()
            if isinstance(error, BrokenProcessPool):
                raise ValueError(
                    "a process ended by itself, killed for want of memory perhaps: lower --at-once"
                ) from error
            raise


_place = Place()


def _take(free: Any, parent: int) -> None:
    """Of a process that begins."""
    global _place  # its own
    os.setsid()  # Ctrl-C is the caller's to handle
    origin.end_with(parent)
    _place = free.get()
    if _place.cores:
        os.sched_setaffinity(0, _place.cores)


def _at_its_place(function: Callable[[Task, Place], Answer], task: Task) -> Answer:
    return function(task, _place)
