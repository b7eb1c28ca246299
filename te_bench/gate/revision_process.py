"""One side of a live gate: a process that runs one revision's trials, a fork for each, and times them when it is told to.

Loaded by `origin`, with the revision's checkout first on the path: this file is the gate's own, the same for both sides,
and everything it imports from te_bench is the revision's. It may therefore rely only on what every revision has:
spec.Trial, trial.run, plan.resolve and a `timing` whose functions take (call, device). What else it needs of the gate's own,
`turns.clock` and `planted.planted`, it is given.

Talks in JSON lines over a socket. It is asked {"ask": "plan" | "load" | "trial", ...} and answers with one line, but for a
trial: there the fork says {"pid"}, then {"ready": NAME} whenever the workload wants to time a call, is told {"calls":
n} or {"seconds": s} for each turn, or {"over": true}, and answers a turn with {"seconds": [...], "throttle": bits,
"sm_clock_hz": lowest}; then {"result": what trial.run returned}. Once the fork is gone {"ended": SIGNAL or null}
follows, whatever came before.
"""

import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

#: Calls before the first turn, by what the workload asked its clock for; a compiled step has been compiled by its check.
WARM_UP = {"bench_py": 3, "quickstart": 5, "kernel": 10}
ORPHANS_S = 5.0  # for what a trial left to end, once it is killed
#: Bytes by which, at most, a fork's memory is moved: its side's memory lies as the code happens to have laid it, the same in
#: every round, and what that costs (Mytkowicz et al. 2009, ASPLOS 14:265) is no change's doing.
MOVED = 2**20
NICE = -10  # of a process that is timed; BenchmarkDotNet too has its own run at a high priority


class Lines:
    """JSON lines over a socket."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.rest = b""

    def send(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The next message. Raises EOFError when the other end is gone or talks nonsense, TimeoutError after `timeout` s."""
        until = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self.rest:
            self.connection.settimeout(None if until is None else max(until - time.monotonic(), 1e-3))
            try:
                data = self.connection.recv(2**16)
            except ConnectionError:
                data = b""
            finally:
                self.connection.settimeout(None)
            if not data:
                raise EOFError
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            raise EOFError from None
        if not isinstance(message, dict):
            raise EOFError
        return message


def serve(lines: Lines, clock: Callable[..., Any], planted: Callable[..., Any]) -> None:
    """Answer until the gate is gone. clock: turns.clock; planted: planted.planted."""
    answers: dict[str, Callable[..., object]] = {"plan": _plan, "load": _load}
    while True:
        try:
            message = lines.receive()
        except EOFError:
            return
        ask = message.pop("ask", None)
        if ask is None:  # a turn for a fork that died before it heard of it
            continue
        if ask == "trial":
            _fork(lines, functools.partial(_trial, lines, clock, planted, **message))
            continue
        try:
            lines.send(answer=answers[ask](**message))
        except Exception as error:  # the revision's own: it may be broken, which is what the gate is to tell
            lines.send(error=f"{type(error).__name__}: {error}", refused=isinstance(error, ValueError))


def _plan(suite: str, only: str | None, options: dict[str, Any]) -> dict[str, Any]:
    from te_bench.experiments import plan
    from te_bench.experiments.spec import Options

    known = Options.__dataclass_fields__
    paths = {"cache": Path(options["cache"])} if options.get("cache") else {}
    given = {name: value for name, value in {**options, **paths}.items() if name in known}
    experiment = plan.resolve(suite, Options(**given), only=only)
    _load(sorted({trial.workload for trial in experiment.trials}))
    return {
        "title": experiment.title,
        "baseline": experiment.baseline,
        "trials": [trial.to_json() for trial in experiment.trials],
    }


def _load(workloads: list[str]) -> None:
    """Import them, once for all forks of a round."""
    from te_bench import plugins
    from te_bench.experiments import workloads as package

    for workload in workloads:
        plugins.load(package.__name__, workload, "run")


def _fork(lines: Lines, trial: Callable[[], None]) -> None:
    """Run a trial in a fork; say how it ended. Between it and this process is a warden, so that nothing it starts stays."""
    gc.collect()
    gc.freeze()  # else each fork's collector would walk through all that was imported, copying the pages, while it is timed
    ours, theirs = os.pipe()
    warden = os.fork()
    if warden == 0:
        os.close(theirs)
        _ward(trial, ours)
    os.close(ours)
    _, status = os.waitpid(warden, 0)
    os.close(theirs)
    number = abs(os.waitstatus_to_exitcode(status))
    lines.send(ended=signal.Signals(number).name if number else None)


def _ward(trial: Callable[[], None], side: int) -> NoReturn:
    """Fork the trial; once it has ended, or `side` has no other end, end all that it left. Exits with the trial's signal."""
    os.setsid()
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what loses its parent becomes this process's child
    running = os.fork()
    if running == 0:
        _in_fork(trial, side)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ended, status = os.waitpid(running, os.WNOHANG)
    while not ended and side not in select.select([side, woken], [], [])[0]:
        os.read(woken, 2**10)
        ended, status = os.waitpid(running, os.WNOHANG)
    if not ended:
        os.kill(running, signal.SIGKILL)  # it may not have become a group yet
        _, status = os.waitpid(running, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(running, signal.SIGKILL)
    _end_children()
    os._exit(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _in_fork(trial: Callable[[], None], side: int) -> NoReturn:
    os.setsid()  # a process group of its own
    os.close(side)
    try:
        trial()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # no teardown: freeing a GPU's memory one tensor at a time takes longer than ending the process


def _end_children() -> None:
    """Kill this process's children until it has none: a killed one's own become its children."""
    until = time.monotonic() + ORPHANS_S
    while time.monotonic() < until:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            for stat in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():  # its parent, proc(5)
                        os.kill(int(stat.parent.name), signal.SIGKILL)
            time.sleep(1e-3)


def _trial(
    lines: Lines,
    clock: Callable[..., Any],
    planted: Callable[..., Any],
    *,
    trial: dict[str, Any],
    cache: str | None,
    gpu: str | None,
    check: bool,
    core: int | None,
    fault: dict[str, Any],
) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    from te_bench.experiments import timing
    from te_bench.experiments import trial as runs
    from te_bench.experiments.measurement import Context
    from te_bench.experiments.spec import Trial

    lines.send(pid=os.getpid())
    if trial["protocol"] in WARM_UP:
        _first_in_line()
    faulty = functools.partial(planted, **fault) if fault else None
    for name, calls in WARM_UP.items():
        setattr(timing, name, clock(lines, name, calls, core, faulty))
    asked: dict[str, Any] = {"cache": Path(cache) if cache else None, "check": check}
    context = Context(**{name: value for name, value in asked.items() if name in Context.__dataclass_fields__})
    moved = bytearray(int.from_bytes(os.urandom(4)) % MOVED)
    lines.send(result=runs.run(Trial.from_json(trial), context))
    del moved


def _first_in_line() -> None:
    """Have this session's processes run before others, where that is permitted: they are disturbed less, and done sooner."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    with contextlib.suppress(OSError):  # sched(7): where Linux groups processes by session, that is the group's
        Path("/proc/self/autogroup").write_text(str(NICE))
