"""Measurements side by side: each in a process that has cores, and on a GPU a card, of its own."""

import contextlib
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from te_bench.experiments import host, orphans

Task = TypeVar("Task")
Answer = TypeVar("Answer")
LOOK_S, LEAVE_S = 1.0, 10.0  # between looks for who was killed; for what a process does as it leaves


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
    what the function raises, and ValueError when a process ends by itself or there is no place.
    """
    if not where:
        raise ValueError("no place to run")
    if len(where) == 1:
        for task in tasks:
            yield function(task, where[0])
        return
    # Not a pool of concurrent.futures: when one of its processes is killed, it waits for the others' tasks now and then.
    context = multiprocessing.get_context("spawn")  # threads of the caller's, of torch's say, would not survive a fork
    left = list(tasks)[::-1]
    workers: dict[Any, SpawnProcess] = {}
    try:
        for place in where[: len(left)]:
            connection, its_end = context.Pipe()
            workers[connection] = worker = context.Process(target=_serve, args=(its_end, function, place, os.getpid()))
            worker.start()
            its_end.close()  # the worker's alone then: its death ends what it says
            _ask(connection, left)
        busy: list[Any] = list(workers)
        while busy:
            ready: list[Any] = wait(busy, LOOK_S)
            for connection in ready:
                yield _answer(connection, workers[connection])
                if not _ask(connection, left):
                    busy.remove(connection)
            for connection in busy:  # children that a killed one leaves behind may hold its end
                if not workers[connection].is_alive() and not connection.poll():
                    raise _ended(workers[connection])
        for worker in workers.values():
            worker.join(LEAVE_S)
    finally:
        for worker in workers.values():
            if worker.pid is not None:
                worker.kill()
                worker.join()


def _ask(connection: Any, left: list[Any]) -> bool:
    """Whether there was a task left to ask for; else the process is told to leave."""
    task = [left.pop()] if left else []
    with contextlib.suppress(ConnectionError):  # of a process that has ended, which is seen to
        connection.send(task)
    return bool(task)


def _answer(connection: Any, worker: SpawnProcess) -> Any:
    try:
        succeeded, answer = connection.recv()
    except (EOFError, OSError):
        raise _ended(worker) from None
    if not succeeded:
        raise answer
    return answer


def _ended(worker: SpawnProcess) -> ValueError:
    worker.join(LOOK_S)
    how = f"exit code {worker.exitcode}; killed for want of memory perhaps: lower --at-once"
    return ValueError(f"a process ended by itself ({how})")


def _serve(connection: Any, function: Callable[[Task, Place], Answer], place: Place, parent: int) -> None:
    """In a process of its own: answer task after task, until there is none."""
    os.setsid()  # Ctrl-C is the caller's to handle
    orphans.end_with_parent(parent)
    if place.cores:
        os.sched_setaffinity(0, place.cores)
    while asked := connection.recv():
        try:
            connection.send((True, function(asked[0], place)))
        except BaseException as error:  # of an answer that does not pickle, too
            connection.send((False, _told(error)))


def _told(error: BaseException) -> BaseException:
    """The error with where it came from, in its text alone where it does not survive the way."""
    error.add_note(traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))  # our own
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
