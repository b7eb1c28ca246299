"""The process of one revision in a live gate: it runs the revision's trials, a fork for each, and times them when asked to.

Loaded by `fork_server`, with the revision's checkout first on the path: this file is the gate's own, the same for both
revisions, and everything it imports from te_bench is the revision's. It may therefore rely only on what every revision has:
plugins.load, spec.Trial, measurement.Context, trial.run, plan.resolve and a `timing` whose functions take (call, device).
What else it needs of the gate's own it is given.

Talks in JSON lines over a socket. It is asked {"ask": "plan" | "load" | "trial", ...} and answers with one line, but for a
trial: there the fork sends {"pid"}, then {"ready": NAME} whenever the workload wants to time a call, is asked for {"calls":
n} or {"seconds": s} in each turn, or told {"stop": true}, and answers a turn with {"seconds": [...], "throttle": bits,
"sm_clock_hz": lowest}; then {"result": what trial.run returned}. Once the fork is gone {"ended": SIGNAL or null}
follows, whatever came before.
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

#: Calls before the first turn, by what the workload asked its clock for; a compiled step has been compiled by its check.
WARM_UP = {"bench_py": 3, "quickstart": 5, "kernel": 10}
#: Bytes by which, at most, a fork's memory is moved: its revision's memory lies as the code happens to have laid it, the
#: same in every round, and what that costs (Mytkowicz et al. 2009, ASPLOS 14:265) is no change's doing.
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

    def close(self, timeout: float) -> None:
        """Wait for the other end to close it, `timeout` s at most, then close this one."""
        with contextlib.suppress(OSError):  # which a timeout is
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
    """Answer until the gate is gone, by interleaved_clock.make_clock, planted_faults.plant, processes.run_supervised."""
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
            gc.collect()
            gc.freeze()  # else a fork's collector would walk through all that was imported, copying pages, while it is timed
            lines.send(ended=run_supervised(functools.partial(_run_trial, lines, make_clock, plant, **message)))
            continue
        try:
            lines.send(answer=answers[ask](**message))
        except Exception as error:  # the revision's own: it may be broken, which is what the gate is to tell
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
    """Import them, once for all forks of a round."""
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
    """Have the processes of this session, or of another's leader, run before others, where that is permitted.

    They are disturbed less, and done sooner.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
    with contextlib.suppress(OSError):  # sched(7): where Linux groups processes by session, that is the group's
        Path(f"/proc/{pid or 'self'}/autogroup").write_text(str(NICE))
