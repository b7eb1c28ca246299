"""Run a plan: one forked child a trial, in its own process group, under a time limit; one record each. No torch here.

Children fork from a server that has imported torch once and never touches CUDA (multiprocessing's forkserver), so a fresh
process costs milliseconds. The parent never touches CUDA either: it waits, kills and writes.
"""

import faulthandler
import fcntl
import functools
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path
from typing import Any

from te_bench.experiments import janitor, orphans
from te_bench.experiments.host import oom_kills
from te_bench.experiments.measurement import Context
from te_bench.experiments.spec import Record, Trial
from te_bench.experiments.store import Journal, Store, own

LOGS = "logs"
FORK_SERVERS, FORK_SERVER_DIES_S = 5, 0.3  # attempts at starting a child, and how long a killed server may take to go
#: Imported first, with the runner's pid in the environment: by then the fork server's parent may be another.
LIFELINE, RUNNER = "te_bench.experiments.lifeline", "TE_BENCH_RUNNER"
LONGEST_WAIT = 86400.0  # seconds; poll(2) counts milliseconds in an int, which a --timeout of 25 days would overflow
#: What torch's profiler imports when it starts: 4 s in every child otherwise (2.11, H200), 1.4 s (2.13, CPU; 2026-11-21).
PROFILER: tuple[str, ...] = ("torch._inductor",)
#: The models, and with them all kernels: 0.4 s of every child on a CPU (2026-11-22). For a GPU they are left to the
#: children: no CUDA must be touched before the fork. So are workloads: those that a main module plants come first there.
MODELS: tuple[str, ...] = ("te_bench.experiments.preloaded",)
MOST_AT_ONCE = 8  # trials on a CPU: each is 0.4 GB resident, with what it shares with the fork server
Progress = Callable[[Record | None, Trial | None], None]  # (a record just written, a trial just started)


@dataclass(slots=True)
class Running:
    trial: Trial
    process: BaseProcess
    started: float  # perf_counter
    started_at: str
    reply: Path
    log: Path
    gpu: str | None
    oom_kills: int


def to_do(trials: Sequence[Trial], journal: Journal, environment_id: str, *, retry: bool) -> list[Trial]:
    """The trials that a run would do, in order: those that have not ended, with `retry` those that failed too.

    A divergence is a result, which no second try may replace.
    """

    def waits(key: tuple[str, str]) -> bool:
        return not journal.done(key) or (retry and journal.records[key].outcome not in ("ok", "diverged"))

    return [trial for trial in trials if waits((trial.id, environment_id))]


def at_once(trials: Sequence[Trial], cores: int) -> int:
    """How many trials a CPU runs side by side: as have a core for each of their threads, where all say how many those are.

    Who does not say takes all cores, and has them for itself.
    """
    threads = [int(trial.problem.get("threads") or cores) for trial in trials]
    return max(1, min(cores // max(threads, default=cores), MOST_AT_ONCE))


def run(
    trials: Sequence[Trial],
    store: Store,
    environment_id: str,
    *,
    gpus: Sequence[str | None],
    timeout_s: float,
    context: Context,
    progress: Progress,
    retry: bool = False,
    needless: Callable[[Trial], str | None] = lambda _: None,
) -> None:
    """Run every trial that is `to_do`, once; `gpus` are CUDA_VISIBLE_DEVICES values, one for each trial that runs at a
    time, so that a GPU which is named twice has two; on a CPU None.

    needless(trial), asked when its turn comes, answers why it is not to be run any more: its outcome is "stopped".

    Ctrl-C or SIGTERM ends the children at once and raises KeyboardInterrupt; the store stays valid and a rerun goes on.
    """
    waiting = deque(to_do(trials, store.journal, environment_id, retry=retry))
    free = list(gpus)
    running: list[Running] = []
    # Importing torch's compiler asks whether there is a GPU: by the management library, or CUDA would not survive the fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ[RUNNER] = str(os.getpid())
    server = multiprocessing.get_context("forkserver")
    models = MODELS if all(trial.device == "cpu" for trial in waiting) else ()
    server.set_forkserver_preload(["__main__", LIFELINE, "te_bench.experiments.trial", *PROFILER, *models])
    own(store.directory / LOGS).mkdir(exist_ok=True)
    scratch = _scratch()
    with _terminable():
        try:
            while waiting or running:
                while waiting and free:
                    trial = waiting.popleft()
                    if reason := needless(trial):
                        store.add(_stopped(trial, environment_id, reason))
                        progress(store.journal.records[trial.id, environment_id], None)
                        continue
                    job = _prepare(server, trial, store, free.pop(0), scratch, context)
                    running.append(job)  # first: an interrupt while it starts must find it
                    _start(job.process)
                    progress(None, job.trial)
                for job in _finished(running, timeout_s) if running else ():  # the last may all have been needless
                    running.remove(job)
                    free.append(job.gpu)
                    record = _record(job, environment_id, timeout_s)
                    store.add(record)
                    progress(record, None)
        finally:
            for job in running:
                _kill(job.process)


@functools.cache
def _scratch() -> Path:
    """The folder in which the fork server listens, and trials reply: multiprocessing's own, which a kill would leave."""
    folder = Path(get_temp_dir())
    last = ExitStack()
    last.enter_context(janitor.removed(folder))
    Finalize(None, last.close, exitpriority=-101)  # after its own, of -100, which wants to find it
    return folder


def _prepare(server: Any, trial: Trial, store: Store, gpu: str | None, scratch: Path, context: Context) -> Running:
    reply, log = scratch / f"{trial.id}.json", store.directory / LOGS / f"{trial.id}.log"
    process = server.Process(target=_child, args=(trial.to_json(), str(reply), str(log), gpu, context))
    started, started_at = time.perf_counter(), datetime.now(UTC).isoformat(timespec="milliseconds")
    return Running(trial, process, started, started_at, reply, log, gpu, oom_kills())


def _start(process: BaseProcess) -> None:
    """Start a child. A fork server that is being killed breaks the connection; once it is gone another one starts."""
    for _ in range(FORK_SERVERS - 1):
        with suppress(ConnectionError, EOFError):
            process.start()
            return
        time.sleep(FORK_SERVER_DIES_S)
    process.start()


def _child(trial: Mapping[str, Any], reply: str, log: str, gpu: str | None, context: Context) -> None:
    """In the child: become a process group, log to a file, run the trial, leave the reply whole or not at all."""
    os.setsid()
    _end_with_parent()
    # As in a script. The fork server's children have "forkserver", whose locks have names, which a trial leaves behind.
    multiprocessing.set_start_method("fork", force=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(file=2, all_threads=False)
    gc.freeze()  # the 350,000 objects of what the server imported: a collection that looks at them takes 0.2 s
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        from te_bench.experiments import trial as child
    except ModuleNotFoundError as error:
        result = {"outcome": "unsupported", "reason": f"needs the package {error.name}: pip install {error.name}"}
    else:
        result = child.run(Trial.from_json(trial), context)
    temporary = Path(f"{reply}.part")
    with temporary.open("w") as out:
        json.dump(result, out)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(reply)
    sys.stdout.flush()
    os._exit(0)  # no teardown: freeing a GPU's memory one tensor at a time takes longer than ending the process


def _end_with_parent() -> None:
    """Have the kernel end this process once te-bench is gone, and its whole group by a watcher: no orphan keeps the GPU.

    The kernel ends the fork server with te-bench, and with that its children; what these have started is the watcher's.
    """
    from te_bench.experiments import lifeline  # of the fork server

    orphans.end_with_parent(lifeline.SERVER)
    te_bench = multiprocessing.parent_process()
    assert te_bench is not None
    if os.fork() == 0:
        te_bench.join()
        os.killpg(0, signal.SIGKILL)


def _finished(running: Sequence[Running], timeout_s: float) -> Iterable[Running]:
    """Wait for the next child to end or run out of time; those that did, the latter killed."""
    deadline = min(job.started for job in running) + timeout_s
    left = min(max(0.0, deadline - time.perf_counter()), LONGEST_WAIT)
    ended = wait([job.process.sentinel for job in running], timeout=left)
    now = time.perf_counter()
    return [job for job in running if job.process.sentinel in ended or now - job.started >= timeout_s]


def _orphaned(process: BaseProcess) -> bool:
    """Whether the fork server ended before it said how this child of it did: the exit code would be made up."""
    if not wait([process.sentinel], timeout=0):
        return False
    unread = fcntl.ioctl(
        process.sentinel, termios.FIONREAD, bytes(4)
    )  # an int: how much of the exit code there is to read
    return not any(unread)


def _record(job: Running, environment_id: str, timeout_s: float) -> Record:
    """What became of a child: its reply, or what its end says."""
    wall = time.perf_counter() - job.started
    orphaned = _orphaned(job.process)
    timed_out = job.process.is_alive()
    _kill(job.process)
    result: dict[str, Any] = {}
    if job.reply.exists():
        result = json.loads(job.reply.read_text())
        job.reply.unlink()
    elif timed_out:
        result = {"outcome": "timeout", "reason": f"stopped after {timeout_s:g} s (--timeout)"}
    elif orphaned:
        result = {"outcome": "interrupted", "reason": "the process that starts trials was killed; rerun to repeat it"}
    else:
        result = _post_mortem(job)
    if result["outcome"] == "ok":
        job.log.unlink(missing_ok=True)
    return Record(
        trial=job.trial,
        environment=environment_id,
        started_at=job.started_at,
        wall_s=wall,
        **result,
    )


def _stopped(trial: Trial, environment_id: str, reason: str) -> Record:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return Record(trial=trial, environment=environment_id, outcome="stopped", reason=reason, started_at=now, wall_s=0.0)


def _post_mortem(job: Running) -> dict[str, Any]:
    """The outcome of a child that left no reply: killed by a signal, by the host's out-of-memory killer, or exited."""
    code = job.process.exitcode or 0
    where = f"; see {LOGS}/{job.log.name}"
    if code == -signal.SIGKILL:
        if oom_kills() > job.oom_kills:
            return {"outcome": "oom", "reason": "host: the kernel's out-of-memory killer ended the trial"}
        return {"outcome": "interrupted", "reason": "killed from outside (SIGKILL); rerun to repeat it"}
    if code < 0:
        return {"outcome": "crashed", "reason": f"{signal.Signals(-code).name}{_last_line(job.log)}{where}"}
    return {"outcome": "crashed", "reason": f"exit code {code} without a reply{_last_line(job.log)}{where}"}


def _last_line(log: Path) -> str:
    """ ": " and the last line of a log that says something before faulthandler's dump, or nothing."""
    lines = log.read_text(errors="replace").partition("Fatal Python error:")[0].splitlines() if log.exists() else []
    said = [line.strip() for line in lines if line.strip() and not line.startswith(("USDT:", "  File"))]
    return f": {said[-1][:200]}" if said else ""


def _kill(process: BaseProcess) -> None:
    """End a child and all it started; its process group outlives it while a grandchild runs."""
    if process.pid is None:  # interrupted before it was started
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():  # it had not become a group of its own yet
        process.kill()
    process.join()


class _terminable:
    """While inside, SIGTERM does what Ctrl-C does, and a second of either does not disturb the clean-up."""

    def __enter__(self) -> None:
        def interrupt(number: int, frame: object) -> None:
            for each in self.before:
                signal.signal(each, signal.SIG_IGN)
            raise KeyboardInterrupt

        signals = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
        self.before = {number: signal.signal(number, interrupt) for number in signals}

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
