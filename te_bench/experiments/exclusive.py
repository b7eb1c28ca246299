"""Trials of several te-bench processes on the same GPUs take turns: while one is timed, no other works there.

A trial that is timed holds a lock file of its GPU together with the others, and alone while it is timed. So two commands
on one GPU build, compile and check side by side, and each is timed as if it were alone. Of a trial over several GPUs the
first rank holds all of them, and the others wait for it. Trainings, whose losses are judged, and searches for the largest
batch hold no lock. Reads no torch.
"""

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from te_bench.experiments.problems import world_of
from te_bench.experiments.spec import Trial

TIMED = ("bench_py", "quickstart", "kernel", "turns", "once")  # of spec.PROTOCOLS

_HELD: ContextVar["_Turn | None"] = ContextVar("held", default=None)


class _Rank(NamedTuple):
    number: int
    meet: Callable[[], None]


_RANK: ContextVar[_Rank | None] = ContextVar("rank", default=None)


class _Turn:
    """A trial's hold on its GPUs: of each, `work` is held together or alone, and whoever wants either passes `gate` first.

    The gate is for fairness: flock lets those who share in again and again while one waits to be alone. All take GPUs in
    one order, and nobody waits for one while holding a later one, so that no two wait for each other.
    """

    def __init__(self, gpus: Sequence[str]):
        stems = [
            Path(tempfile.gettempdir()) / f"te-bench-{re.sub(r'[^A-Za-z0-9_.-]', '-', gpu)}" for gpu in sorted(gpus)
        ]
        self.locks = [  # (gate, work)
            tuple(_opened(stem.with_name(f"{stem.name}.{kind}.lock")) for kind in ("gate", "work")) for stem in stems
        ]

    def share(self) -> None:
        for gate, work in self.locks:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(work, fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)

    def take(self) -> None:
        for _, work in self.locks:
            fcntl.flock(work, fcntl.LOCK_UN)  # else those who wait for it would wait for each other
        for gate, work in self.locks:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(work, fcntl.LOCK_EX)

    def give_back(self) -> None:
        for gate, work in self.locks:
            fcntl.flock(work, fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)

    def close(self) -> None:
        for lock in self.locks:
            for descriptor in lock:
                os.close(descriptor)


@contextlib.contextmanager
def of_ranks(number: int, meet: Callable[[], None]) -> Iterator[None]:
    """This process is a rank of a trial over several GPUs. meet: waits until every rank has called it."""
    token = _RANK.set(_Rank(number, meet))
    try:
        yield
    finally:
        _RANK.reset(token)


def meet() -> None:
    """Wait for the trial's other ranks, if it has any: what each times is to begin at once."""
    if (rank := _RANK.get()) is not None:
        rank.meet()


@contextlib.contextmanager
def taking_turns(trial: Trial) -> Iterator[None]:
    """Hold the trial's GPUs together with other trials, and alone inside `alone`. On a CPU nothing is held."""
    visible = [gpu.strip() for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    if trial.device != "cuda" or not visible or trial.protocol not in TIMED:
        yield
        return
    rank = _RANK.get()
    turn = _Turn(visible[: world_of(trial)] if rank is None or rank.number == 0 else [])
    token = _HELD.set(turn)
    try:
        turn.share()
        meet()  # the first rank may wait for another trial's timing, which the other ranks' work would disturb
        yield
        meet()  # they may still work when the first has done
    finally:
        _HELD.reset(token)
        turn.close()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other trial works on the GPUs, and keep it so; at once where nothing is held. All ranks ask at once."""
    turn = _HELD.get()
    if turn is None:
        yield
        return
    meet()  # a rank may still work, for which the first holds the GPUs together with other trials
    turn.take()
    try:
        meet()
        yield
        meet()  # a rank may still be timed
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
