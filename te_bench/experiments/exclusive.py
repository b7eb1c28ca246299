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

_HELD: ContextVar["_Turn | None"] = ContextVar("held", default=None)


class _Turn:
    """A trial's hold on its GPU: `work` is held together or alone, and whoever wants either passes `gate` first.

    The gate is for fairness: flock lets those who share in again and again while one waits to be alone.
    """

    def __init__(self, gpu: str):
        stem = Path(tempfile.gettempdir()) / f"te-bench-{re.sub(r'[^A-Za-z0-9_.-]', '-', gpu)}"
        self.gate, self.work = (_opened(stem.with_name(f"{stem.name}.{kind}.lock")) for kind in ("gate", "work"))

    def share(self) -> None:
        fcntl.flock(self.gate, fcntl.LOCK_EX)
        fcntl.flock(self.work, fcntl.LOCK_SH)
        fcntl.flock(self.gate, fcntl.LOCK_UN)

    def take(self) -> None:
        fcntl.flock(self.work, fcntl.LOCK_UN)  # else those who wait for it would wait for each other
        fcntl.flock(self.gate, fcntl.LOCK_EX)
        fcntl.flock(self.work, fcntl.LOCK_EX)

    def give_back(self) -> None:
        fcntl.flock(self.work, fcntl.LOCK_SH)
        fcntl.flock(self.gate, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self.work)
        os.close(self.gate)


@contextlib.contextmanager
def taking_turns(trial: Trial) -> Iterator[None]:
    """Hold the GPU together with other trials, and alone inside `alone`. On a CPU, and over ranks, nothing is held.

    A trial over several GPUs would wait for one of them while another of its ranks keeps the next from being free.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    if trial.device != "cuda" or not gpu or trial.protocol not in TIMED or world_of(trial) > 1:
        yield
        return
    turn = _Turn(gpu)
    token = _HELD.set(turn)
    try:
        turn.share()
        yield
    finally:
        _HELD.reset(token)
        turn.close()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other trial works on the GPU, and keep it so; at once where nothing is held."""
    turn = _HELD.get()
    if turn is None:
        yield
        return
    turn.take()
    try:
        yield
    finally:
        turn.give_back()


def _opened(path: Path) -> int:
    """A descriptor of a file that any user may read, and so lock: in /tmp another's cannot be opened as if to make it."""
    with contextlib.suppress(PermissionError):
        made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(PermissionError):  # it is somebody else's
            os.fchmod(made, 0o644)
        return made
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
