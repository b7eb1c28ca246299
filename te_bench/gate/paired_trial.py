"""Run one trial by two revisions at once, timed in turns (A B, B A, A B, ...), and return a record of each.

Both processes exist before the first turn, so a disturbance within the seconds of a pair hits both. While one is timed, the
other waits. On a CPU each process has one thread, keeps the memory that it frees, uses huge pages, and takes its turns on
the core of the other. The table shows how much pairs of unchanged code vary, in %: suite `quick`, two cores with other load,
November 2026.

| Choice | % | Instead | % |
|---|---:|---|---:|
| both processes at once, in turns | 1 to 2 | one after the other | 24 to 40 |
| memory in huge pages, load 5 | 4.3 | small pages, whose placement decides a process's speed | 8.6 |
| both on one core, load 4 | 1.3 | one core each, with different neighbours | 4.8 |
| 16 turns of each, calls of 40 to 100 ms | 3.6 | 8; 12; 24 or 32 | 6.1; 4.0; 3.7 |
| 10 turns of each, a quieter machine | 1.1 | 6; 8; 12 | 1.3; 1.2; 1.2 |
| the lowest tenth's quantile | 2.0 | the median; the minimum | 5.2; 2.7 |
| a process's quantile | 1.2 | the median of its turns' own ratios | 1.8 |

Freed memory is kept because the kernel zeroes new pages at either of two speeds, which differ by a factor of two.
"""

import contextlib
import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from te_bench.experiments.host import oom_kills
from te_bench.experiments.processes import kill_group
from te_bench.experiments.spec import Record, Trial, canonical_json
from te_bench.gate import fork_server
from te_bench.gate.revision_process import WARM_UP, Lines

PROTOCOL = "turns"
#: Turns of each revision and timed call; fewer make a pair noisier, more do not make it less noisy (table above).
MOST_TURNS, FEWEST_TURNS = 16, 10
#: Seconds of one turn, or one call if that is longer; seconds of all turns of a revision, within the numbers above.
TURN_S, TIMED_S = 0.03, 0.9
SHORTEST_S = 1e-7  # the shortest assumed call, so that an empty call has a time
PAUSE_S = 0.002  # before a turn: the other revision's threads may spin for so long after their last turn
#: Imported once for both revisions. Torch brings everything but te_bench that `quick` needs.
SHARED = ("torch", "torch._dynamo", "scipy.stats")
START_S = 300.0  # for the imports of a revision
_ZOMBIE_S = 1.0  # within this time, a process that has closed its socket has ended
_KILLED_S = 10.0  # within this time, a killed process has ended
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000000",
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # request huge pages; by default Linux grants them on request
}
_RESULT = frozenset({"outcome", "reason", "work_s", "check", "work", "samples", "kernels", "device_state"})


class Unrunnable(Exception):
    """A revision cannot be imported or planned, or its process does not answer; the message says why.

    refused: the revision's answer to a question that it rejects, about an unknown suite for instance.
    """

    def __init__(self, message: str, refused: str | None = None):
        super().__init__(message)
        self.refused = refused


def how_ended(code: int | None, oom_kills_before: int) -> str:
    """Say how a process ended; code: as of Popen, None if unknown. oom_kills_before: the count at its start."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    memory = code == -signal.SIGKILL and oom_kills() > oom_kills_before
    name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
    return f"ended by {name}{', for the host was out of memory' * memory}"


class ForkServer:
    """The process that revision processes are forked from; they end with it."""

    def __init__(self, log: Path, *, device: str):
        self.connection, theirs = socket.socketpair()
        shared = [*SHARED, *(["torch._inductor"] if device == "cuda" else [])]
        arguments = [str(theirs.fileno()), str(os.getpid()), str(log), *shared]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", fork_server.__file__, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**(ONE_THREAD if device == "cpu" else {}), **os.environ},  # the user's variables win
            )

    def fork(self, root: Path) -> socket.socket:
        """Return the socket of a new process; the socket is closed if no process could be forked."""
        ours, theirs = socket.socketpair()
        message = json.dumps({"root": str(root), "modules": ["te_bench.experiments.trial"]}).encode()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.connection, [message], [theirs.fileno()])
        return ours

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class RevisionProcess:
    """The gate's end of the process that forks one revision's trials."""

    def __init__(self, name: str, root: Path, server: ForkServer):
        """Raise Unrunnable if the process cannot be forked."""
        self.name, self.environment = name, ""
        self.pid, self._oom_kills = 0, oom_kills()
        self.lines = Lines(server.fork(root))
        self.pid = int(self._receive()["pid"])

    def wait_for_imports(self, root: Path) -> None:
        """Raise Unrunnable if the imports fail or come from another te_bench."""
        package = Path(self.answer()).resolve()
        if not package.is_relative_to(root / "te_bench"):
            raise Unrunnable(f"{self.name}: te_bench was imported from {package}, not from the revision's files")

    def ask(self, what: str, **message: Any) -> None:
        """Ask for a "plan" or "load", without waiting for `answer`: both revisions work at the same time."""
        with contextlib.suppress(OSError):  # the process is gone, which `answer` reports
            self.lines.send(ask=what, **message)

    def answer(self) -> Any:
        """Return what was asked for. Raise Unrunnable if the revision cannot answer."""
        found = self._receive()
        if "error" in found:
            refused = found["error"].removeprefix("ValueError: ") if found.get("refused") else None
            raise Unrunnable(f"{self.name}: {found['error']}", refused)
        return found["answer"]

    def _receive(self) -> dict[str, Any]:
        try:
            return self.lines.receive(START_S)
        except EOFError:
            how = how_ended(_code_of_zombie(self.pid), self._oom_kills)
            raise Unrunnable(f"{self.name}: its process {how} while it was asked") from None
        except TimeoutError:
            raise Unrunnable(f"{self.name}: no answer within {START_S:g} s") from None

    def close(self) -> None:
        """End the process and the trial that it runs, which also holds the socket."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
        self.lines.close(_KILLED_S)


def _code_of_zombie(pid: int) -> int | None:
    """Return the exit code of a process that the fork server never waits for, as of Popen; None if it cannot be read."""
    until = time.monotonic() + _ZOMBIE_S
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5)
            if stat[0] == "Z":
                return os.waitstatus_to_exitcode(int(stat[-1]))
            time.sleep(1e-3)
    return None


@dataclass(slots=True)
class TrialProcess:
    """One revision's run of a trial: what it was asked, what it has answered, and how long it may still take."""

    revision: RevisionProcess
    trial: Trial
    started: float  # perf_counter
    started_at: str
    limit_s: float
    left_s: float = 0.0  # of the limit, at `since`
    since: float | None = None  # monotonic; None while it is the other revision's turn
    pid: int | None = None
    ready: bool = False  # to be timed
    ended: bool = False
    result: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    throttle: int = 0
    sm_clocks: list[float] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return not self.ready and not self.ended

    @property
    def until(self) -> float:
        """The monotonic time at which the limit is reached; the other revision's turns do not count."""
        return (time.monotonic() if self.since is None else self.since) + self.left_s

    def send(self, **message: Any) -> None:
        self.since = time.monotonic()
        with contextlib.suppress(OSError):  # the process is gone, which the next `receive` reports
            self.revision.lines.send(**message)

    def take_turn(self, **asked: Any) -> list[float]:
        """Return the seconds that one turn measured; [] if the process ended in it."""
        time.sleep(PAUSE_S)
        self.send(**asked)
        message = self.receive()
        if "seconds" not in message:
            self.handle(message)
            return []
        self.pause_limit()
        self.throttle |= message["throttle"]
        self.sm_clocks += [message["sm_clock_hz"]] if message["sm_clock_hz"] else []
        seconds: list[float] = message["seconds"]
        return seconds

    def end_turns(self) -> None:
        self.ready = False
        self.send(stop=True)

    def pause_limit(self) -> None:
        self.left_s, self.since = self.until - time.monotonic(), None

    def receive(self) -> dict[str, Any]:
        """Return the next message; {"ended": ...} if the process is gone. Kill a trial that exceeds its limit."""
        try:
            return self.revision.lines.receive(max(self.until - time.monotonic(), 0.0))
        except EOFError:
            return {"ended": "its process was killed"}
        except TimeoutError:
            return self.time_out()

    def time_out(self) -> dict[str, Any]:
        """Kill the trial and its children; return its last message."""
        self.result = {"outcome": "timeout", "reason": f"stopped after {self.limit_s:g} s (--timeout)"}
        if self.pid is not None:
            kill_group(self.pid)
        try:
            while "ended" not in (message := self.revision.lines.receive(_KILLED_S)):
                pass
        except (EOFError, TimeoutError):
            self.revision.close()
            return {"ended": "its process was killed"}
        return message

    def handle(self, message: Mapping[str, Any]) -> None:
        self.pid = message.get("pid", self.pid)
        self.ready = "ready" in message
        if "result" in message and not self.result:
            reply = message["result"]
            self.result = reply if isinstance(reply, dict) and reply else {"outcome": f"the reply {reply!r}"}
        if "ended" in message:
            self.ended, self.ready = True, False
            self.wall_s = time.perf_counter() - self.started
            how = message["ended"] or "without a result"
            self.result = self.result or {"outcome": "crashed", "reason": f"the process ended: {how}"}
        if not self.busy:
            self.pause_limit()

    def record(self) -> Record:
        """Return the record; a result that a record cannot hold counts as a crash."""
        try:
            return self._record(self.result)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            return self._record({"outcome": "crashed", "reason": f"te-bench cannot read the result: {error!r}"})

    def _record(self, reply: Mapping[str, Any]) -> Record:
        result = {name: value for name, value in reply.items() if name in _RESULT}
        state = dict(result.get("device_state") or {})
        if self.throttle:
            state["throttle_reasons"] = self.throttle | int(state.get("throttle_reasons") or 0)
        if self.sm_clocks:
            state["sm_clock_hz"] = min(self.sm_clocks)
        outcome = {"outcome": result.pop("outcome")}
        found = Record(
            trial=as_recorded(self.trial),
            environment=self.revision.environment,
            started_at=self.started_at,
            wall_s=self.wall_s,
            **outcome,
            **{**result, "device_state": state},
        )
        canonical_json(found.to_json())  # raise for NaN and infinity, which JSON lacks
        return found


def as_recorded(trial: Trial) -> Trial:
    """Return the trial with the protocol that a record of this gate states."""
    return replace(trial, protocol=PROTOCOL) if trial.protocol in WARM_UP else trial


def as_known(trial: Mapping[str, Any]) -> Trial:
    """Return a revision's trial as this te_bench's Trial, without fields that only the revision knows."""
    names = {one.name for one in fields(Trial)}
    return Trial.from_json({name: value for name, value in trial.items() if name in names})


def run(
    revisions: Sequence[RevisionProcess],
    trials: Mapping[str, Mapping[str, Any]],
    *,
    timeout_s: float,
    cache: Path | None = None,
    gpu: str | None = None,
    check: bool = True,
    faults: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Record]:
    """Run one trial by one or both revisions, revisions[0] first. Return a record of each; never raise for their failures.

    trials: {revision's name: the trial as JSON in that revision's plan}. Untimed trials run one after the other: they may
    need all of the machine's memory, or a budget of seconds, for themselves. check: compare the result with its reference
    first; a revision that lacks this option always compares. faults, for a self-test: {revision's name: options of
    `planted_faults.plant`}.
    """
    more = {"cache": str(cache) if cache else None, "gpu": gpu, "check": check, "core": choose_core(trials)}

    def begin(revision: RevisionProcess) -> TrialProcess:
        asked = trials[revision.name]
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        one = TrialProcess(revision, as_known(asked), time.perf_counter(), now, timeout_s, left_s=timeout_s)
        one.send(ask="trial", trial=dict(asked), fault=dict((faults or {}).get(revision.name) or {}), **more)
        return one

    if not all(as_known(trials[one.name]).protocol in WARM_UP for one in revisions):
        return [record for one in revisions for record in _run_to_the_end([begin(one)])]
    return _run_to_the_end([begin(one) for one in revisions])


def choose_core(trials: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Return the core on which both revisions take their turns; None if they may use several.

    The core changes with the seed and this process's id, so that two gates started together use different cores. One core
    serves both revisions, because two cores have neighbours that use their caches differently.
    """
    first = as_known(next(iter(trials.values())))
    if first.device != "cpu" or os.environ.get("OMP_NUM_THREADS", "1") != "1" or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[(first.seed + os.getpid()) % len(cores)]


def _run_to_the_end(running: Sequence[TrialProcess]) -> list[Record]:
    while not all(one.ended for one in running):
        _wait_until_ready(running)
        take_turns([one for one in running if one.ready])
    return [one.record() for one in running]


def _wait_until_ready(running: Sequence[TrialProcess]) -> None:
    """Wait until each process is ready to be timed, or has ended; they work at the same time."""
    while busy := [one for one in running if one.busy]:
        unread = any(b"\n" in one.revision.lines.rest for one in busy)
        left = max(min(one.until for one in busy) - time.monotonic(), 0.0)
        waiting = [] if unread else [one.revision.lines.connection for one in busy]
        heard = select.select(waiting, [], [], left)[0] if waiting else []
        for one in busy:
            if b"\n" in one.revision.lines.rest or one.revision.lines.connection in heard:
                one.handle(one.receive())
            elif one.until <= time.monotonic():
                one.handle(one.time_out())


def _try_turn(one: TrialProcess) -> list[float]:
    """Run the first turn; return a call's seconds, by the wall or its own clock, whichever is longer; [] if it ended."""
    began = time.perf_counter()
    seconds = one.take_turn(seconds=TURN_S)
    each = (time.perf_counter() - began - PAUSE_S) / max(len(seconds), 1)
    return [max(each, own) for own in seconds]


def take_turns(ready: Sequence[TrialProcess]) -> None:
    """Time one call of each process, with equally many calls a turn: as many as fit into a turn by the wall clock.

    The call's own clock would make a GPU kernel's turn ten times as long: the L2 is overwritten before each call, and the
    device is held until the call is queued.
    """
    tried = [took for one in ready for took in _try_turn(one)]
    if tried:
        call = max(statistics.median(tried), SHORTEST_S)
        calls = max(1, round(TURN_S / call))
        turns = min(MOST_TURNS, max(FEWEST_TURNS, round(TIMED_S / (calls * call))))
        for number in range(turns):
            for one in ready if number % 2 == 0 else ready[::-1]:
                if one.ready:
                    one.take_turn(calls=calls)
    for one in ready:
        if one.ready:
            one.end_turns()
