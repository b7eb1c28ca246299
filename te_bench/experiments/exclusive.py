"""Trials of several te-bench processes on one GPU take turns: while one is timed, no other works there.

A trial that is timed holds a lock file of its GPU together with the others, and alone while it is timed. So two commands
on one GPU build, compile and check side by side, and each is timed as if it were alone. Trainings, whose losses are
judged, and searches for the largest batch hold no lock. Reads no torch.
"""

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from te_bench.experiments.problems import world_of
from te_bench.experiments.spec import Trial

TIMED = ("bench_py", "quickstart", "kernel", "turns", "once")  # of spec.PROTOCOLS

_HELD: ContextVar[int | None] = ContextVar("held", default=None)  # descriptor of the lock file


@contextlib.contextmanager
def taking_turns(trial: Trial) -> Iterator[None]:
    """Hold the GPU together with other trials, and alone inside `alone`. On a CPU, and over ranks, nothing is held.

    A trial over several GPUs would wait for one of them while another of its ranks keeps the next from being free.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    if trial.device != "cuda" or not gpu or trial.protocol not in TIMED or world_of(trial) > 1:
        yield
        return
    name = re.sub(r"[^\w.-]", "-", gpu)  # a part of a GPU has slashes
    lock = _opened(Path(tempfile.gettempdir()) / f"te-bench-{name}.lock")
    token = _HELD.set(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        _HELD.reset(token)
        os.close(lock)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other trial works on the GPU, and keep it so; at once where nothing is held."""
    lock = _HELD.get()
    if lock is None:
        yield
        return
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_SH)


def _opened(path: Path) -> int:
    """A descriptor; of a file that another user made as well, which in /tmp cannot be opened as if to make it."""
    with contextlib.suppress(PermissionError):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
