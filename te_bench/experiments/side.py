"""One side of a live gate: a process that runs one revision's trials, a fork for each, and times them when it is told to.

Loaded by `origin`, with the revision's checkout first on the path: this file is the gate's own, the same for both sides,
and everything it imports from te_bench is the revision's. It may therefore rely only on what every revision has:
spec.Trial, trial.run, plan.resolve and a `timing` whose functions take (call, device).

Talks in JSON lines over a socket. It is asked {"ask": "plan" | "load" | "trial", ...} and answers with one line, but for a
trial: there the fork says {"pid"}, then {"ready": NAME} whenever the workload wants to time a call, is told {"calls":
n} or {"seconds": s} for each turn, or {"over": true}, and answers a turn with {"seconds": [...], "throttle": bits,
"sm_clock_hz": lowest}; then {"result": what trial.run returned}. Once the fork is gone {"ended": SIGNAL or null}
follows, whatever came before.
"""

import contextlib
import gc
import itertools
import json
import os
import select
import signal
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

#: Calls before the first turn, by what the workload asked its clock for; a compiled step has been compiled by its check.
WARM_UP = {"bench_py": 3, "quickstart": 5, "kernel": 10}
ORPHANS_S = 5.0  # for what a trial left to end, once it is killed
#: Bytes by which, at most, a fork's memory is moved: its side's memory lies as the code happens to have laid it, the same in
#: every round, and what that costs (Mytkowicz et al. 2009, ASPLOS 14:265) is no change's doing.
MOVED = 2**20
NICE = -10  # of a process that is timed; BenchmarkDotNet too has its own run at a high priority
EVENTS = 10  # pairs of CUDA events that are recorded before the device is waited for, where the L2 is flushed
HELD = 10**8  # cycles that the device waits for the host at most: 0.05 s; a call may wait for the device itself
CLOCK = 2e9  # Hz, that of a fast device's processors: a slower one waits longer
LEAKS = 64  # calls that leak: a GPU's memory should last for thousands


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
            _fork(lines, message)
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


def _fork(lines: Lines, message: dict[str, Any]) -> None:
    """Run a trial in a fork; say how it ended. Between it and this process is a warden, so that nothing it starts stays."""
    gc.collect()
    gc.freeze()  # else each fork's collector would walk through all that was imported, copying the pages, while it is timed
    ours, theirs = os.pipe()
    warden = os.fork()
    if warden == 0:
        os.close(theirs)
        _ward(lines, message, ours)
    os.close(ours)
    _, status = os.waitpid(warden, 0)
    os.close(theirs)
    number = abs(os.waitstatus_to_exitcode(status))
    lines.send(ended=signal.Signals(number).name if number else None)


def _ward(lines: Lines, message: dict[str, Any], side: int) -> NoReturn:
    """Fork the trial; once it has ended, or `side` has no other end, end all that it left. Exits with the trial's signal."""
    os.setsid()
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what loses its parent becomes this process's child
    trial = os.fork()
    if trial == 0:
        _in_fork(lines, message, side)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ended, status = os.waitpid(trial, os.WNOHANG)
    while not ended and side not in select.select([side, woken], [], [])[0]:
        os.read(woken, 2**10)
        ended, status = os.waitpid(trial, os.WNOHANG)
    if not ended:
        os.kill(trial, signal.SIGKILL)  # it may not have become a group yet
        _, status = os.waitpid(trial, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(trial, signal.SIGKILL)
    _end_children()
    os._exit(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _in_fork(lines: Lines, message: dict[str, Any], side: int) -> NoReturn:
    os.setsid()  # a process group of its own
    os.close(side)
    try:
        _trial(lines, **message)
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
    for name, calls in WARM_UP.items():
        setattr(timing, name, _in_turns(lines, name, calls, core, fault))
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


def _in_turns(
    lines: Lines, name: str, warm_up: int, core: int | None, fault: dict[str, Any]
) -> Callable[[Callable[[], object], str], list[float]]:
    """A clock in place of the revision's: it times `call` when the gate says so, and returns all that it timed."""

    def clock(call: Callable[[], object], device: str) -> list[float]:
        call = _planted(call, device, flush=name == "kernel", **fault) if fault else call
        for _ in range(warm_up):
            call()
        block = _cuda_block(call, flush=name == "kernel") if device == "cuda" else _cpu_block(call)
        kept: list[float] = []
        with _on(core):
            lines.send(ready=name)
            while not (turn := lines.receive()).get("over"):
                before = _clocks(device)
                seconds = list(_turn(block, turn))
                after = _clocks(device)
                if "calls" in turn:
                    kept += seconds
                known = [hz for hz in (before[1], after[1]) if hz]
                lines.send(seconds=seconds, throttle=before[0] | after[0], sm_clock_hz=min(known, default=None))
        return kept

    return clock


@contextlib.contextmanager
def _on(core: int | None) -> Iterator[None]:
    """Have this thread on one core, where the system lets it; anywhere for None."""
    if core is None:
        yield
        return
    cores = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # a core that it was denied meanwhile
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # nor those, where it may choose none or all were taken away
            os.sched_setaffinity(0, cores)


def _planted(
    call: Callable[[], object], device: str, *, flush: bool, slower: float = 0.0, leak: int = 0, crash: bool = False
) -> Callable[[], object]:
    """The call with a fault of the gate's self-test: it takes (1 + slower) times as long, keeps `leak` bytes, or crashes."""
    import torch

    kept: list[object] = []

    def faulty() -> object:
        begin = time.perf_counter()
        found = call()
        if crash:
            os.kill(os.getpid(), signal.SIGSEGV)
        if leak and len(kept) < LEAKS:
            kept.append(torch.ones(leak, dtype=torch.int8, device=device))
        if slower and device == "cuda":
            torch.cuda._sleep(spins)
        until = begin + (1 + slower) * (time.perf_counter() - begin)
        while slower and device != "cuda" and time.perf_counter() < until:
            pass
        return found

    spins = _spins(call, slower, flush=flush) if slower and device == "cuda" else 0
    return faulty


def _spins(call: Callable[[], object], share: float, *, flush: bool) -> int:
    """For how many cycles torch's spinning kernel, put behind a call, makes it longer by that share on the device.

    Timed behind the call: a device at its power cap has other clocks than one that spins alone.
    """
    import torch

    def seconds(spins: int | None) -> float:
        def followed() -> None:
            call()
            if spins is not None:
                torch.cuda._sleep(spins)

        for _ in range(3):
            followed()
        return statistics.median(_cuda_block(followed, flush=flush)(2 * EVENTS))

    alone = seconds(None)
    many = max(round(10 * share * alone * CLOCK), 1)
    launched, spinning = seconds(0), seconds(many)
    a_cycle = max(spinning - launched, 0.1 * many / CLOCK) / many
    return max(round((share * alone - max(launched - alone, 0.0)) / a_cycle), 0)


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
    """Seconds between events around each call, by the device's clock.

    flush: as a kernel is timed, with the L2 overwritten before each call and the device held until EVENTS of them are
    queued, so that a call which is launched more slowly than it runs is not as slow as its launches.
    """
    import torch

    size = 2 * torch.cuda.get_device_properties().L2_cache_size if flush else 0
    l2 = torch.empty(size, dtype=torch.int8, device="cuda")

    def queued(calls: int, held: int) -> tuple[list[float], float]:
        """Their seconds, after so many cycles' wait, and those of queueing them."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        torch.cuda.synchronize()
        if held:
            torch.cuda._sleep(held)
        began = time.perf_counter()
        for before, after in events:
            if flush:
                l2.zero_()
            before.record()
            call()
            after.record()
        queueing = time.perf_counter() - began
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in events], queueing

    most = EVENTS if flush else sys.maxsize
    held_a_call = 1.5 * queued(EVENTS, 0)[1] / EVENTS * CLOCK if flush else 0.0

    def block(calls: int) -> list[float]:
        found: list[float] = []
        while calls > len(found):
            now = min(calls - len(found), most)
            found += queued(now, min(round(now * held_a_call), HELD))[0]
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
