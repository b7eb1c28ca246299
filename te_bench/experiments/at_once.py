"""Measurements side by side: each in a process that has cores, and on a GPU a card, of its own."""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
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
    # Not a pool of concurrent.futures: when one of its processes is killed, it waits for the others' tasks now and then.
    context = multiprocessing.get_context("spawn")  # threads of the caller's, of torch's say, would not survive a fork
    left = iter(tasks)
    workers: dict[Any, SpawnProcess] = {}
    try:
        for place, task in zip(where, left, strict=False):
            connection, its_end = context.Pipe()
            worker = context.Process(target=_serve, args=(its_end, function, place, os.getpid()))
            worker.start()
            workers[connection] = worker
            its_end.close()  # the worker's alone then: its death ends what it says
            _ask(connection, task)
        while workers:
            ready: list[Any] = wait(list(workers))
            for connection in ready:
                answer = _answer(connection)
                try:
                    _ask(connection, next(left))
                except StopIteration:
                    connection.close()
                    workers.pop(connection).join()
                yield answer
    finally:
        for worker in workers.values():
            worker.kill()
            worker.join()


def _ask(connection: Any, task: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # of a process that has ended, which `_answer` tells
        connection.send(task)


def _answer(connection: Any) -> Any:
    try:
        succeeded, answer = connection.recv()
    except (EOFError, ConnectionError):
        raise ValueError("a process ended by itself, killed for want of memory perhaps: lower --at-once") from None
    if not succeeded:
        raise answer
    return answer


def _serve(connection: Any, function: Callable[[Task, Place], Answer], place: Place, parent: int) -> None:
    """In a process of its own: answer task after task, until no more come."""
    os.setsid()  # Ctrl-C is the caller's to handle
    origin.end_with(parent)
    if place.cores:
        os.sched_setaffinity(0, place.cores)
    with contextlib.suppress(EOFError):
        while True:
            task = connection.recv()
            try:
                connection.send((True, function(task, place)))
            except Exception as error:  # an answer that does not pickle, too
                error.add_note(traceback.format_exc())  # which does not pickle
                connection.send((False, error))
