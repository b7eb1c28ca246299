"""A trial run by two revisions at once, which take turns at being timed: A B, B A, A B, ... One record of each.

Both processes are there before the first turn, so whatever the machine does in the seconds of a pair it does to both: in
A/A pairs of `quick` on two busy cores, processes one after the other differ by 24 to 40 %, in turns by 1 to 2 (sd of the
trimmed log-ratios, 2026-11-21). Only one of them computes at a time. On a CPU each has one thread, for threads that wait
for each other measure the neighbours' load, and keeps the memory that it frees, for otherwise the kernel's zeroing of
pages has processes of one program run at speeds that differ by a factor of two.
"""

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from te_bench.experiments import side
from te_bench.experiments.spec import Record, Trial

PROTOCOL = "turns"
MOST_TURNS, FEWEST_TURNS = 12, 6  # of each side and timed call
TURN_S, TIMED_S = 0.03, 0.6  # a turn lasts the first or one call; a side's turns the second, within the numbers above
PAUSE_S = 0.002  # before a turn: threads of the other side may spin for so long after its last
START_S = 300.0  # for the imports of a revision
_KILLED_S = 10.0  # a killed process has ended by then
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000000",
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
_RESULT = frozenset({"outcome", "reason", "work_s", "check", "work", "samples", "kernels", "device_state"})


class Unrunnable(Exception):
    """A revision that cannot be imported or planned, or whose process does not answer; the message says why.

    refused: what it said to a question that it does not accept, of a suite that it does not have for instance.
    """

    def __init__(self, message: str, refused: str | None = None):
        super().__init__(message)
        self.refused = refused


class Side:
    """The process that forks one revision's trials, until it is closed."""

    def __init__(self, name: str, root: Path, log: Path, *, device: str):
        self.name, self.environment = name, ""
        ours, theirs = socket.socketpair()
        modules = ["te_bench.experiments.trial", *(["torch._inductor"] if device == "cuda" else [])]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", side.__file__, str(theirs.fileno()), str(os.getpid()), str(log), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(root, device),
                cwd=root,
            )
        self.lines = side.Lines(ours)

    def started(self, root: Path) -> None:
        """Wait for its imports. Raises Unrunnable when they fail, or are another te_bench's."""
        package = Path(self.answer())
        if not package.is_relative_to(root):
            raise Unrunnable(f"{self.name}: te_bench was imported from {package}, not from the revision's files")

    def ask(self, what: str, **message: Any) -> None:
        """Ask for a "plan", to which `answer` is the answer: both sides work on theirs at the same time."""
        self.lines.send(ask=what, **message)

    def answer(self) -> Any:
        """What it was asked for. Raises Unrunnable when the revision cannot tell."""
        try:
            found = self.lines.receive(START_S)
        except EOFError:
            raise Unrunnable(f"{self.name}: its process ended while it was asked") from None
        except TimeoutError:
            raise Unrunnable(f"{self.name}: no answer within {START_S:g} s") from None
        if "error" in found:
            refused = found["error"].removeprefix("ValueError: ") if found.get("refused") else None
            raise Unrunnable(f"{self.name}: {found['error']}", refused)
        return found["answer"]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # should it not have become a group yet
        self.process.wait()
        self.lines.connection.close()


def _environment(root: Path, device: str) -> dict[str, str]:
    """The revision's files first on the path; what the user sets for threads and memory stands."""
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**(_ONE_THREAD if device == "cpu" else {}), **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@dataclass(slots=True)
class _Running:
    """One side's share of a pair, while it lasts."""

    side: Side
    trial: Trial
    started: float  # perf_counter
    started_at: str
    limit_s: float  # for any one answer: time that the other side takes is not this one's
    deadline: float = 0.0  # monotonic
    pid: int | None = None
    ready: bool = False  # to be timed
    ended: bool = False
    result: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    throttle: int = 0
    sm_clocks: list[float] = field(default_factory=list)

    def wait(self) -> None:
        """Until it is ready to be timed, or has ended."""
        while not self.ready and not self.ended:
            self.take(self.next())

    def turn(self, **asked: Any) -> list[float]:
        """The seconds that one turn measured; [] when the process ended in it."""
        time.sleep(PAUSE_S)
        self.say(**asked)
        message = self.next()
        if "seconds" not in message:
            self.take(message)
            return []
        self.throttle |= message["throttle"]
        self.sm_clocks += [message["sm_clock_hz"]] if message["sm_clock_hz"] else []
        seconds: list[float] = message["seconds"]
        return seconds

    def over(self) -> None:
        self.ready = False
        self.say(over=True)

    def say(self, **message: Any) -> None:
        self.deadline = time.monotonic() + self.limit_s
        with contextlib.suppress(OSError):  # it is gone, which the next message will tell
            self.side.lines.send(**message)

    def next(self) -> dict[str, Any]:
        """The side's next message. A trial that exceeds its time is killed; a side that is gone says that it ended."""
        try:
            return self.side.lines.receive(max(self.deadline - time.monotonic(), 0.0))
        except EOFError:
            return {"ended": "its process was killed"}
        except TimeoutError:
            self.result = {"outcome": "timeout"}
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.deadline = time.monotonic() + _KILLED_S
        try:
            return self.side.lines.receive(_KILLED_S)
        except (EOFError, TimeoutError):
            self.side.close()
            return {"ended": "its process was killed"}

    def take(self, message: Mapping[str, Any]) -> None:
        self.pid = message.get("pid", self.pid)
        self.ready = "ready" in message
        self.result = self.result or message.get("result", {})
        if "ended" in message:
            self.ended, self.ready = True, False
            self.wall_s = time.perf_counter() - self.started
            how = message["ended"] or "without a result"
            self.result = self.result or {"outcome": "crashed", "reason": f"the process ended: {how}"}

    def record(self) -> Record:
        result = {name: value for name, value in self.result.items() if name in _RESULT}
        if result["outcome"] == "timeout":
            result["reason"] = f"stopped after {self.limit_s:g} s (--timeout)"
        state = dict(result.get("device_state") or {})
        if self.throttle:
            state["throttle_reasons"] = self.throttle | int(state.get("throttle_reasons") or 0)
        if self.sm_clocks:
            state["sm_clock_hz"] = min(self.sm_clocks)
        return Record(
            trial=recorded(self.trial),
            environment=self.side.environment,
            started_at=self.started_at,
            wall_s=self.wall_s,
            **{**result, "device_state": state},
        )


def recorded(trial: Trial) -> Trial:
    """The trial as a record of it says it was timed."""
    return replace(trial, protocol=PROTOCOL) if trial.protocol in side.WARM_UP else trial


def run(
    sides: Sequence[Side],
    trial: Trial,
    *,
    timeout_s: float,
    cache: Path | None = None,
    gpu: str | None = None,
    faults: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Record]:
    """The trial on one side or both, the first of them first; a record of each. Never raises for what a revision does.

    faults: {side's name: a fault of `side.py` to plant in it}, of a self-test.
    """
    running = []
    for server in sides:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        running.append(_Running(server, trial, time.perf_counter(), now, timeout_s))
        fault = (faults or {}).get(server.name)
        running[-1].say(
            ask="trial", trial=trial.to_json(), cache=str(cache) if cache else None, gpu=gpu, fault=dict(fault or {})
        )
    while not all(one.ended for one in running):
        for one in running:
            one.wait()
        _take_turns([one for one in running if one.ready])
    return [one.record() for one in running]


def _take_turns(ready: Sequence[_Running]) -> None:
    """Time one call of each side, as many calls a turn on both."""
    tried = [seconds for one in ready for seconds in one.turn(seconds=TURN_S)]
    if tried:
        call = statistics.median(tried)
        calls = max(1, round(TURN_S / call))
        turns = min(MOST_TURNS, max(FEWEST_TURNS, round(TIMED_S / (calls * call))))
        for number in range(turns):
            for one in ready if number % 2 == 0 else ready[::-1]:
                if one.ready:
                    one.turn(calls=calls)
    for one in ready:
        if one.ready:
            one.over()
