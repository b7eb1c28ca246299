"""Let trials of several te-bench processes share GPUs by turns: while one trial is timed, no other works there.

A timed trial holds its GPU's lock file shared, and exclusively while it is timed. Two commands on one GPU thus build,
compile and check side by side, and each is timed as if it were alone. For a trial over several GPUs the first rank holds all
the locks, and the other ranks wait for it. Trainings, which are judged by losses, and searches for the largest batch hold no
lock. Does not import torch.
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

TIMED = ("bench_py", "quickstart", "kernel", "turns", "once")  # those of spec.PROTOCOLS that measure times

_HELD: ContextVar["_Turn | None"] = ContextVar("held", default=None)


class _Rank(NamedTuple):
    number: int
    meet: Callable[[], None]


_RANK: ContextVar[_Rank | None] = ContextVar("rank", default=None)


class _Turn:
    """A trial's locks on its GPUs: `work`, held shared or exclusively, and `gate`, taken first for either.

    The gate gives fairness: without it flock admits sharers again and again while another waits for exclusive use. All
    trials take GPUs in one order, and none waits for a GPU while it holds a later one, so there is no deadlock.
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
            fcntl.flock(work, fcntl.LOCK_UN)  # else two waiting trials would wait for each other
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
    """Mark this process as a rank of a trial over several GPUs. meet: waits until every rank has called it."""
    token = _RANK.set(_Rank(number, meet))
    try:
        yield
    finally:
        _RANK.reset(token)


def meet() -> None:
    """Wait for the trial's other ranks, if any, so that all start timing at once."""
    if (rank := _RANK.get()) is not None:
        rank.meet()


@contextlib.contextmanager
def taking_turns(trial: Trial) -> Iterator[None]:
    """Hold the trial's GPUs shared with other trials, and exclusively inside `alone`. On a CPU hold nothing."""
    visible = [gpu.strip() for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    if trial.device != "cuda" or not visible or trial.protocol not in TIMED:
        yield
        return
    rank = _RANK.get()
    turn = _Turn(visible[: world_of(trial)] if rank is None or rank.number == 0 else [])
    token = _HELD.set(turn)
    try:
        turn.share()
        meet()  # the first rank may be waiting for another trial's timing, which other ranks' work would disturb
        yield
        meet()  # other ranks may still work when the first has ended
    finally:
        _HELD.reset(token)
        turn.close()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the GPUs exclusively, after other trials' work has ended; without locks, continue at once. All ranks call it."""
    turn = _HELD.get()
    if turn is None:
        yield
        return
    meet()  # a rank may still work under the shared lock
    turn.take()
    try:
        meet()
        yield
        meet()  # a rank may still be timed
    finally:
        turn.give_back()


def _opened(path: Path) -> int:
    """Return a descriptor of a file that any user can lock. In /tmp, Linux refuses O_CREAT for another user's file."""
    with contextlib.suppress(PermissionError):
        made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(PermissionError):  # another user owns the file
            os.fchmod(made, 0o644)
        return made
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
