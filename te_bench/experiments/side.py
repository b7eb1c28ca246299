"""One side of a live gate: a process that runs one revision's trials, a fork for each, and times them when it is told to.

Run as a program by `pairs.Side`, with the revision's checkout on PYTHONPATH: this file is the gate's own, the same for
both sides, and everything it imports from te_bench is the revision's. It may therefore rely only on what every revision
has: spec.Trial, trial.run, plan.resolve and a `timing` whose functions take (call, device).

Talks in JSON lines over the socket whose number is its argument. It is asked {"ask": "plan" | "trial", ...}
and answers with one line, but for a trial: there the fork says {"pid"}, then {"ready": NAME} whenever the workload wants to
time a call, is told {"calls": n} or {"seconds": s} for each turn, or {"over": true}, and answers a turn with {"seconds":
[...], "throttle": bits, "sm_clock_hz": lowest}; then {"result": what trial.run returned}. Once the fork is gone {"ended":
SIGNAL or null} follows, whatever came before.
"""

import itertools
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Calls before the first turn, by what the workload asked its clock for; a compiled step has been compiled by its check.
WARM_UP = {"bench_py": 3, "quickstart": 5, "kernel": 10}
EVENTS = 10  # pairs of CUDA events that are recorded before the device is waited for, where the L2 is flushed


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


def serve(lines: Lines) -> None:
    """Answer until the gate is gone."""
    while True:
        try:
            message = lines.receive()
        except EOFError:
            return
        ask = message.pop("ask", None)
        if ask is None:  # a turn for a fork that died before it heard of it
            continue
        if ask == "trial":
            _fork(lines, message)
            continue
        try:
            lines.send(answer=_plan(**message))
        except Exception as error:  # the revision's own: it may be broken, which is what the gate is to tell
            lines.send(error=f"{type(error).__name__}: {error}", refused=isinstance(error, ValueError))


def _plan(suite: str, only: str | None, options: dict[str, Any]) -> dict[str, Any]:
    from te_bench import plugins
    from te_bench.experiments import plan, workloads
    from te_bench.experiments.spec import Options

    known = Options.__dataclass_fields__
    paths = {"cache": Path(options["cache"])} if options.get("cache") else {}
    given = {name: value for name, value in {**options, **paths}.items() if name in known}
    experiment = plan.resolve(suite, Options(**given), only=only)
    for workload in {trial.workload for trial in experiment.trials}:  # once, for all forks
        plugins.load(workloads.__name__, workload, "run")
    return {
        "title": experiment.title,
        "baseline": experiment.baseline,
        "trials": [trial.to_json() for trial in experiment.trials],
    }


def _fork(lines: Lines, message: dict[str, Any]) -> None:
    """Run a trial in a fork; say how it ended. Whatever the trial started itself ends with it, or with this process."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()  # a process group of its own
        os.close(theirs)
        if os.fork() == 0:  # the watcher: reads until nobody holds the other end
            os.read(ours, 1)
            os.killpg(0, signal.SIGKILL)
        os.close(ours)
        try:
            _trial(lines, **message)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # no teardown: freeing a GPU's memory one tensor at a time takes longer than ending the process
    os.close(ours)
    _, status = os.waitpid(child, 0)
    os.close(theirs)
    lines.send(ended=signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else None)


def _trial(
    lines: Lines, *, trial: dict[str, Any], cache: str | None, gpu: str | None, check: bool, fault: dict[str, Any]
) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    from te_bench.experiments import timing
    from te_bench.experiments import trial as runs
    from te_bench.experiments.measurement import Context
    from te_bench.experiments.spec import Trial

    lines.send(pid=os.getpid())
    for name, calls in WARM_UP.items():
        setattr(timing, name, _in_turns(lines, name, calls, fault))
    asked: dict[str, Any] = {"cache": Path(cache) if cache else None, "check": check}
    context = Context(**{name: value for name, value in asked.items() if name in Context.__dataclass_fields__})
    lines.send(result=runs.run(Trial.from_json(trial), context))


def _in_turns(
    lines: Lines, name: str, warm_up: int, fault: dict[str, Any]
) -> Callable[[Callable[[], object], str], list[float]]:
    """A clock in place of the revision's: it times `call` when the gate says so, and returns all that it timed."""

    def clock(call: Callable[[], object], device: str) -> list[float]:
        call = _planted(call, device, **fault) if fault else call
        for _ in range(warm_up):
            call()
        block = _cuda_block(call, flush=name == "kernel") if device == "cuda" else _cpu_block(call)
        lines.send(ready=name)
        kept: list[float] = []
        while True:
            turn = lines.receive()
            if turn.get("over"):
                return kept
            before = _clocks(device)
            seconds = list(_turn(block, turn))
            after = _clocks(device)
            if "calls" in turn:
                kept += seconds
            known = [hz for hz in (before[1], after[1]) if hz]
            lines.send(seconds=seconds, throttle=before[0] | after[0], sm_clock_hz=min(known, default=None))

    return clock


def _planted(
    call: Callable[[], object], device: str, *, slower: float = 0.0, leak: int = 0, crash: bool = False
) -> Callable[[], object]:
    """The call with a fault of the gate's self-test: it takes (1 + slower) times as long, keeps `leak` bytes, or crashes."""
    import torch

    kept = []

    def faulty() -> object:
        begin = time.perf_counter()
        found = call()
        if crash:
            os.kill(os.getpid(), signal.SIGSEGV)
        if leak:
            kept.append(torch.ones(leak, dtype=torch.int8, device=device))
        if slower and device == "cuda":
            torch.cuda._sleep(int(slower * cycles[0]))
        until = begin + (1 + slower) * (time.perf_counter() - begin)
        while slower and device != "cuda" and time.perf_counter() < until:
            pass
        return found

    cycles = [_cycles(call)] if slower and device == "cuda" else [0.0]
    return faulty


def _cycles(call: Callable[[], object]) -> float:
    """How many turns of torch's spinning kernel last as long as one call does on the device."""
    import torch

    def milliseconds(of: Callable[[], object], times: int) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        before.record()
        for _ in range(times):
            of()
        after.record()
        torch.cuda.synchronize()
        return before.elapsed_time(after) / times

    for _ in range(3):
        call()
    spins = 10_000_000
    return milliseconds(call, 10) / milliseconds(lambda: torch.cuda._sleep(spins), 3) * spins


def _turn(block: Callable[[int], list[float]], turn: dict[str, Any]) -> Iterator[float]:
    """The seconds of as many calls as asked for, or of calls until so many seconds have passed."""
    if "calls" in turn:
        yield from block(turn["calls"])
        return
    until = time.perf_counter() + turn["seconds"]
    while True:
        yield from block(1)
        if time.perf_counter() >= until:
            return


def _cpu_block(call: Callable[[], object]) -> Callable[[int], list[float]]:
    """Seconds of each call on the wall, less those in which this thread waited for a core that others had.

    Waits while other threads of this process computed are its own doing and count. Linux says how long a thread waited;
    elsewhere it is the wall's seconds.
    """
    try:
        waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY)  # opened by the thread that is timed
    except OSError:
        waits = None

    def waited() -> int:
        return int(os.pread(waits, 64, 0).split()[1]) if waits is not None else 0

    def edge() -> tuple[float, float, float]:
        """The wall's clock, the wait so far and what other threads have computed; read anew if interrupted meanwhile."""
        for _ in range(3):
            wait, wall, others = waited(), time.perf_counter(), time.process_time() - time.thread_time()
            if waited() == wait:
                break
        return wall, wait * 1e-9, others

    def block(calls: int) -> list[float]:
        edges = [edge()]
        for _ in range(calls):
            call()
            edges.append(edge())
        steps = ([b - a for a, b in zip(before, after, strict=True)] for before, after in itertools.pairwise(edges))
        return [wall - min(max(wait - others, 0.0), 0.99 * wall) for wall, wait, others in steps]

    return block


def _cuda_block(call: Callable[[], object], *, flush: bool) -> Callable[[int], list[float]]:
    """Seconds between events around each call, by the device's clock; the L2 is overwritten before each where asked for."""
    import torch

    size = 2 * torch.cuda.get_device_properties().L2_cache_size if flush else 0
    l2 = torch.empty(size, dtype=torch.int8, device="cuda")

    def block(calls: int) -> list[float]:
        found: list[float] = []
        while calls > 0:
            now = min(calls, EVENTS) if flush else calls
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(now)]
            torch.cuda.synchronize()
            for before, after in events:
                if flush:
                    l2.zero_()
                before.record()
                call()
                after.record()
            torch.cuda.synchronize()
            found += [before.elapsed_time(after) / 1e3 for before, after in events]
            calls -= now
        return found

    return block


def _clocks(device: str) -> tuple[int, float | None]:
    """(reasons why the GPU's clocks are held back, nvml.h's bits; its SM clock in Hz); (0, None) where nobody knows."""
    if device != "cuda":
        return 0, None
    import torch

    try:
        import pynvml
    except ImportError:
        return 0, None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        return (
            pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1e6,
        )
    except pynvml.NVMLError:
        return 0, None


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, by whatever. Linux only; elsewhere the socket's end tells it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def main() -> None:
    """side.py SOCKET PARENT LOG [MODULE ...]: import the modules, then serve."""
    number, parent, log, *modules = sys.argv[1:]
    _end_with(int(parent))
    os.setsid()  # Ctrl-C is the gate's to handle
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # Importing torch's compiler asks whether there is a GPU: by the management library, or CUDA would not survive the fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    lines = Lines(socket.socket(fileno=int(number)))
    try:
        for module in modules:
            __import__(module)
    except Exception as error:  # a revision that cannot be imported
        lines.send(error=f"{type(error).__name__}: {error}")
        return
    import te_bench

    lines.send(answer=te_bench.__file__)
    serve(lines)


if __name__ == "__main__":
    main()
