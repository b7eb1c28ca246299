"""The process of one revision in a live gate: it forks a process for each of the revision's trials, timed on request.

`fork_server` loads this file of the gate's te_bench for both revisions, with the revision's checkout first on the path.
Everything that this file imports from te_bench is the revision's. It may therefore use only what every revision has:
plugins.load, spec.Trial, measurement.Context, trial.run, plan.resolve and a `timing` whose functions take (call, device).
Everything else of the gate's te_bench is passed in.

The process and the gate exchange JSON lines over a socket. The gate asks {"ask": "plan" | "load" | "trial", ...}; a plan
or load gets one line in answer. For a trial, the fork sends {"pid"}, then {"ready": NAME} whenever the workload wants to
time a call. The gate then sends {"calls": n} or {"seconds": s} for each turn, which the fork answers with {"seconds":
[...], "throttle": bits, "sm_clock_hz": lowest}, and {"stop": true} after the last turn. The fork sends {"result": what
trial.run returned}. After the fork's end {"ended": SIGNAL or null} always follows.
"""

import contextlib
import functools
import gc
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Calls before the first turn, by the workload's choice of clock; its check has already compiled a compiled step.
WARM_UP = {"bench_py": 3, "quickstart": 5, "kernel": 10}
#: Largest shift of a fork's memory, in bytes. The layout of a revision's memory is the same in every round and affects its
#: speed (Mytkowicz et al. 2009, ASPLOS 14:265); a random shift keeps that effect from looking like a change's.
MOVED = 2**20
NICE = -10  # of a timed process; BenchmarkDotNet also raises the priority


class Lines:
    """Messages as JSON lines over a socket."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.rest = b""

    def send(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the next message. Raise EOFError for a closed end or invalid JSON, TimeoutError after `timeout` s."""
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

    def close(self, timeout: float) -> None:
        """Wait at most `timeout` s for the other end to close the socket, then close this end."""
        with contextlib.suppress(OSError):  # also a timeout
            self.connection.settimeout(timeout)
            while self.connection.recv(2**16):
                pass
        self.connection.close()


def serve(
    lines: Lines,
    *,
    make_clock: Callable[..., Any],
    plant: Callable[..., Any],
    run_supervised: Callable[[Callable[[], None]], str | None],
) -> None:
    """Answer until the gate ends, with interleaved_clock.make_clock, planted_faults.plant, processes.run_supervised."""
    answers: dict[str, Callable[..., object]] = {"plan": _plan, "load": _load}
    while True:
        try:
            message = lines.receive()
        except EOFError:
            return
        ask = message.pop("ask", None)
        if ask is None:  # a turn meant for a fork that has died
            continue
        if ask == "trial":
            gc.collect()
            gc.freeze()  # else a timed fork's collector would walk through all imports and copy their pages
            lines.send(ended=run_supervised(functools.partial(_run_trial, lines, make_clock, plant, **message)))
            continue
        try:
            lines.send(answer=answers[ask](**message))
        except Exception as error:  # a broken revision is for the gate to report
            lines.send(error=f"{type(error).__name__}: {error}", refused=isinstance(error, ValueError))


def _plan(suite: str, only: str | None, options: dict[str, Any]) -> dict[str, Any]:
    from te_bench.experiments import plan
    from te_bench.experiments.spec import Options

    names = Options.__dataclass_fields__
    paths = {"cache": Path(options["cache"])} if options.get("cache") else {}
    given = {name: value for name, value in {**options, **paths}.items() if name in names}
    experiment = plan.resolve(suite, Options(**given), only=only)
    _load(sorted({trial.workload for trial in experiment.trials}))
    trials = [trial.to_json() for trial in experiment.trials]
    return {"title": experiment.title, "baseline": experiment.baseline, "trials": trials}


def _load(workloads: list[str]) -> None:
    """Import the workloads once for all forks of a round."""
    from te_bench import plugins
    from te_bench.experiments import workloads as package

    for workload in workloads:
        plugins.load(package.__name__, workload, "run")


def _run_trial(
    lines: Lines,
    make_clock: Callable[..., Any],
    plant: Callable[..., Any],
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
    from te_bench.experiments import trial as trials
    from te_bench.experiments.measurement import Context
    from te_bench.experiments.spec import Trial

    lines.send(pid=os.getpid())
    if trial["protocol"] in WARM_UP:
        raise_priority()
    faulty = functools.partial(plant, **fault) if fault else None
    for name, calls in WARM_UP.items():
        setattr(timing, name, make_clock(lines, name, calls, core, faulty))
    asked: dict[str, Any] = {"cache": Path(cache) if cache else None, "check": check}
    context = Context(**{name: value for name, value in asked.items() if name in Context.__dataclass_fields__})
    moved = bytearray(int.from_bytes(os.urandom(4)) % MOVED)
    lines.send(result=trials.run(Trial.from_json(trial), context))
    del moved


def raise_priority(pid: int = 0) -> None:
    """Raise the priority of this session's processes, or of the session that `pid` leads, if permitted.

    Other processes then disturb them less.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
    with contextlib.suppress(OSError):  # sched(7): with autogrouping, Linux applies this value to the session
        Path(f"/proc/{pid or 'self'}/autogroup").write_text(str(NICE))
