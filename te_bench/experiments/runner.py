"""Run a plan: each trial once, on an executor's places, with one record each. No torch here.

`Supervisor` is the executor of this host; `on_ray.RayExecutor` uses it on each host of a cluster. Each trial gets a process
in its own process group, under a time limit. The processes fork from a server that has imported torch once and never
touches CUDA (multiprocessing's forkserver), so a fresh process costs milliseconds. The parent never touches CUDA either: it
waits, kills and writes.
"""

import faulthandler
import functools
import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path
from typing import Any, Protocol

from te_bench.experiments import janitor
from te_bench.experiments.host import oom_kills
from te_bench.experiments.measurement import Context
from te_bench.experiments.problems import trunk_of
from te_bench.experiments.processes import Ended, ProcessCall, end_with_parent, log_to, wait_for_any
from te_bench.experiments.spec import Record, Trial
from te_bench.experiments.store import Journal, Store, own

LOGS = "logs"
AT_ONCE_S = 0.02  # signals closer together count as one
FORK_SERVERS, FORK_SERVER_DIES_S = 5, 0.3  # attempts to start a child; time for a killed server to end
PRELOAD = "te_bench.experiments.fork_server_preload"
#: Environment variables for the preload module: te-bench's process id, and the modules to import.
RUNNER, PRELOADED = "TE_BENCH_RUNNER", "TE_BENCH_PRELOADED"
TRIAL = "te_bench.experiments.trial"
#: Imported by torch's profiler when it starts: 4 s in every child otherwise (2.11, H200), 1.4 s (2.13, CPU).
PROFILER: tuple[str, ...] = ("torch._inductor",)
#: Imported by every step on a CPU: models with all kernels, the step's check, and the backends of a plain step; half a
#: second in every child. For a GPU the children import them, because nothing may touch CUDA before the fork. Children also
#: import workloads, because a main module's own workloads take precedence.
MODELS: tuple[str, ...] = (
    "te_bench.models.zoo.gpt",
    "te_bench.experiments.checks.training_step",
    "te_bench.kernels.adamw.backends.triton",
    "te_bench.kernels.linear_cross_entropy.backends.fp8",
)
MOST_AT_ONCE = 8  # trials on a CPU; each has 0.4 GB resident, including pages shared with the fork server
Progress = Callable[[Record | None, Trial | None], None]  # (a record just written, a trial just started)


@dataclass(slots=True)
class RunningTrial:
    trial: Trial
    call: ProcessCall
    started: float  # perf_counter
    started_at: str
    log: Path
    gpu: str | None
    oom_kills: int


def to_do(trials: Sequence[Trial], journal: Journal, environment_id: str, *, retry: bool) -> list[Trial]:
    """Return the trials that a run would do, in order: those that have not ended and, with `retry`, those that failed.

    A divergence is a result, which no retry may replace.
    """

    def waits(key: tuple[str, str]) -> bool:
        return not journal.done(key) or (retry and journal.records[key].outcome not in ("ok", "diverged"))

    return [trial for trial in trials if waits((trial.id, environment_id))]


def at_once(trials: Sequence[Trial], cores: int) -> int:
    """Return how many trials a CPU runs side by side: one core for each thread, if all trials state their threads.

    A trial that states none uses all cores and runs alone. So does any trial but a training, which is judged by its losses.
    """
    said = [trial.problem.get("threads") if trial.workload == "training" else None for trial in trials]
    worlds = [int(trial.problem.get("world") or 1) for trial in trials]
    threads = [int(number or cores) * world for number, world in zip(said, worlds, strict=True)]
    return max(1, min(cores // max(threads, default=cores), MOST_AT_ONCE))


class Executor(Protocol):
    """Runs trials on places, one at a time on each. It returns records; only `run` writes them."""

    free: list[Any]  # free places, the next one first

    @property
    def busy(self) -> bool:
        """Return whether a trial is running."""

    def submit(self, trial: Trial, place: Any) -> None:
        """Start the trial on a free place, and return at once."""

    def ended(self) -> Iterator[Record]:
        """Yield the records of ended trials, after freeing their places; wait for one, or for a change of the places."""

    def kill(self) -> None:
        """End every running trial, and all its children."""


def run(
    trials: Sequence[Trial],
    store: Store,
    environment_id: str,
    executor: Executor,
    *,
    progress: Progress,
    retry: bool = False,
    needless: Callable[[Trial], str | None],
    in_time: Callable[[Trial], bool],
    unchanged: Callable[[], bool] = lambda: True,
) -> list[Trial]:
    """Run every trial of `to_do` once, each on the executor's next free place; return the trials left, in order.

    needless(trial): why the trial is not needed any more; its outcome is then "stopped". in_time(trial): whether it ends in
    time; if not, later trials go first, and the trial is left for a rerun unless it is needless. A branch waits, and lets
    others go first, while another trial may be training its trunk. If no trial has trained the trunk, the branch must be in
    time together with it, which takes as long as the control. unchanged(): whether trials would still run the code that the
    environment names; if not, no further trial begins.

    Ctrl-C or SIGTERM ends the trials at once and raises KeyboardInterrupt(the signal's number). The store stays valid, and
    a rerun continues.
    """

    def is_spared(trial: Trial) -> bool:
        if reason := needless(trial):
            store.add(_stopped(trial, environment_id, reason))
            progress(store.journal.records[trial.id, environment_id], None)
        return bool(reason)

    waiting = deque(to_do(trials, store.journal, environment_id, retry=retry))
    here = (one for (_, where), one in store.journal.records.items() if where == environment_id)
    grown, running = trunks_there(here), dict[str, str | None]()  # existing trunks; {running trial: its trunk}

    def may_begin(trial: Trial) -> bool:
        control = trunk_of(trial)
        if control is None or control.id in grown:
            return in_time(trial)
        return control.id not in running.values() and in_time(trial) and in_time(control)

    with _Interrupts() as interrupts:
        try:
            while True:
                while waiting and executor.free and unchanged() and (trial := _take_next(waiting, may_begin)):
                    if not is_spared(trial):
                        running[trial.id] = _trunk_id(trial)
                        executor.submit(trial, executor.free.pop(0))
                        progress(None, trial)
                if not executor.busy and (executor.free or not any(map(in_time, waiting))):
                    break
                for record in executor.ended():
                    store.add(record)
                    trunk = running.pop(record.trial.id, None)
                    grown |= {trunk} if record.outcome == "ok" else set()
                    progress(record, None)
            return [trial for trial in waiting if not is_spared(trial)]
        finally:
            interrupts.ignore()
            executor.kill()


def trunks_there(records: Iterable[Record]) -> set[str | None]:
    """Return the trunks that branches have continued."""
    return {_trunk_id(one.trial) for one in records if one.outcome == "ok"}


def _trunk_id(trial: Trial) -> str | None:
    control = trunk_of(trial)
    return None if control is None else control.id


def _take_next(waiting: deque[Trial], may_begin: Callable[[Trial], bool]) -> Trial | None:
    """Remove and return the first trial that may begin; None if none may."""
    for place, trial in enumerate(waiting):
        if may_begin(trial):
            del waiting[place]
            return trial
    return None


class Supervisor:
    """The executor of this host. Its places are values of CUDA_VISIBLE_DEVICES, or None on a CPU; a GPU that is listed
    twice has two places.
    """

    def __init__(
        self,
        directory: Path,
        environment_id: str,
        gpus: Sequence[str | None],
        *,
        state: Mapping[str, Any],
        timeout_s: float,
        context: Context,
        on_cpu: bool,
    ):
        """directory: logs/ is created in it. state: of the host, for each record. on_cpu: no trial needs a GPU."""
        self.free = list(gpus)
        self._running: list[RunningTrial] = []
        self._logs, self._environment_id = directory / LOGS, environment_id
        self._state, self._timeout_s, self._context, self._on_cpu = state, timeout_s, context, on_cpu

    @functools.cached_property
    def _server(self) -> Any:
        own(self._logs).mkdir(exist_ok=True)
        return start_fork_server(on_cpu=self._on_cpu)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, trial: Trial, place: str | None) -> None:
        job = _prepare(self._server, trial, self._logs, place, self._context)
        self._running.append(job)  # before start_child: an interrupt during it must find the job
        start_child(job.call)

    def ended(self) -> Iterator[Record]:
        for job in _finished(self._running, self._timeout_s):
            self._running.remove(job)
            self.free.append(job.gpu)
            record = _record(job, self._environment_id, self._timeout_s)
            yield replace(record, device_state={**record.device_state, **self._state})

    def kill(self) -> None:
        for job in self._running:
            job.call.kill()


def start_fork_server(*, on_cpu: bool) -> Any:
    """Return multiprocessing's context whose processes fork from a server; start the server if it is not running.

    The server imports for seconds, while the caller continues. on_cpu: no trial needs a GPU.
    """
    _remove_scratch()
    # Importing torch's compiler asks for a GPU. Asking CUDA, not NVML, would break CUDA in the forked processes.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ[RUNNER] = str(os.getpid())
    os.environ[PRELOADED] = " ".join([TRIAL, *PROFILER, *(MODELS if on_cpu else ())])
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["__main__", PRELOAD])
    resource_tracker.ensure_running()  # else the server's start does it, and unblocks Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # the server inherits this until its preload
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return server


@functools.cache
def _remove_scratch() -> None:
    """Remove the folder in which the fork server listens when te-bench ends, even if killed."""
    last = ExitStack()
    last.enter_context(janitor.remove_at_end(Path(get_temp_dir())))
    Finalize(None, last.close, exitpriority=-101)  # after multiprocessing's own (-100), which needs the folder


def _prepare(server: Any, trial: Trial, logs: Path, gpu: str | None, context: Context) -> RunningTrial:
    log = logs / f"{trial.id}.log"
    call = ProcessCall(server, _run_trial, trial.to_json(), str(log), gpu, context, raises=False)
    started, started_at = time.perf_counter(), datetime.now(UTC).isoformat(timespec="milliseconds")
    return RunningTrial(trial, call, started, started_at, log, gpu, oom_kills())


def start_child(call: ProcessCall) -> None:
    """Start a child. If the fork server is being killed, the connection breaks; retry until a new server has started."""
    for _ in range(FORK_SERVERS - 1):
        with suppress(ConnectionError, EOFError):
            call.start()
            return
        time.sleep(FORK_SERVER_DIES_S)
    call.start()


def _run_trial(trial: Mapping[str, Any], log: str, gpu: str | None, context: Context) -> str:
    """In the child: lead a process group, log to a file, run the trial; return its reply in JSON for the record."""
    os.setsid()
    _end_with_te_bench()
    # Like in a script. With "forkserver", the children's default, a trial leaves the names of its locks behind.
    multiprocessing.set_start_method("fork", force=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log_to(log)
    faulthandler.enable(file=2, all_threads=False)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        from te_bench.experiments import trial as child
    except ModuleNotFoundError as error:
        return json.dumps(
            {"outcome": "unsupported", "reason": f"needs the package {error.name}: pip install {error.name}"}
        )
    return json.dumps(child.run(Trial.from_json(trial), context))


def _end_with_te_bench() -> None:
    """End this process when te-bench ends, by the kernel, and its group by a watcher, so that no orphan keeps the GPU.

    The kernel ends the fork server with te-bench, and the server's children with it; the watcher ends their children.
    """
    preloaded = sys.modules.get(PRELOAD)  # None if the program started a fork server before te-bench
    end_with_parent(os.getppid() if preloaded is None else preloaded.SERVER)
    te_bench = multiprocessing.parent_process()
    assert te_bench is not None
    if os.fork() == 0:
        te_bench.join()
        os.killpg(0, signal.SIGKILL)


def _finished(running: Sequence[RunningTrial], timeout_s: float) -> Iterable[RunningTrial]:
    """Wait until a child ends or runs out of time; return those that did."""
    deadline = min(job.started for job in running) + timeout_s
    wait_for_any([job.call for job in running], max(0.0, deadline - time.perf_counter()))
    now = time.perf_counter()
    return [job for job in running if job.call.ended or now - job.started >= timeout_s]


def _record(job: RunningTrial, environment_id: str, timeout_s: float) -> Record:
    """Return a child's record: its reply, or the outcome by how it ended."""
    wall = time.perf_counter() - job.started
    timed_out = not job.call.ended
    job.call.kill()
    try:
        result: dict[str, Any] = json.loads(job.call.result())
    except Ended as end:
        result = (
            {"outcome": "timeout", "reason": f"stopped after {timeout_s:g} s (--timeout)"}
            if timed_out
            else post_mortem(end, job.oom_kills, job.log)
        )
    if result["outcome"] == "ok":
        job.log.unlink(missing_ok=True)
    elif result["outcome"] == "crashed" and job.log.exists() and job.log.stat().st_size:
        result["reason"] += f"; see {LOGS}/{job.log.name}"
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


def post_mortem(end: Ended, oom_kills_before: int, log: Path | None) -> dict[str, Any]:
    """Return the outcome of a child without a reply: killed by a signal or the out-of-memory killer, or exited.

    oom_kills_before: the count at its start. log: a file that only this child wrote.
    """
    code = end.exit_code
    if end.orphaned:
        return {"outcome": "interrupted", "reason": "the process that starts trials was killed; rerun to repeat it"}
    if code == -signal.SIGKILL:
        if oom_kills() > oom_kills_before:
            return {"outcome": "oom", "reason": "host: the kernel's out-of-memory killer ended the trial"}
        return {"outcome": "interrupted", "reason": "killed from outside (SIGKILL); rerun to repeat it"}
    if code < 0:
        return {"outcome": "crashed", "reason": f"{signal.Signals(-code).name}{_last_line(log)}"}
    return {"outcome": "crashed", "reason": f"exit code {code} without a reply{_last_line(log)}"}


def _last_line(log: Path | None) -> str:
    """Return ": " and the last line of a log before faulthandler's dump, or ""."""
    text = log.read_text(errors="replace") if log is not None and log.exists() else ""
    lines = text.partition("Fatal Python error:")[0].splitlines()
    said = [line.strip() for line in lines if line.strip() and not line.startswith(("USDT:", "  File"))]
    return f": {said[-1][:200]}" if said else ""


class _Interrupts:
    """Inside, SIGTERM acts like Ctrl-C, signals at the same moment count as one, and none disturbs the clean-up.

    A later signal counts again: Python drops an exception in a finaliser, and te_bench.cli.interrupts repeats the signal.
    """

    def __enter__(self) -> "_Interrupts":
        last = -math.inf

        def interrupt(number: int, frame: object) -> None:
            nonlocal last
            before, last = last, time.monotonic()
            if last - before > AT_ONCE_S:
                raise KeyboardInterrupt(number)

        signals = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
        self.before = {number: signal.signal(number, interrupt) for number in signals}
        return self

    def ignore(self) -> None:
        for number in self.before:
            signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
