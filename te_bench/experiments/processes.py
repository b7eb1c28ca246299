"""Processes that do one thing and end: with their parent, in time, with all that they started. Imports no te_bench.

te-bench has two engines, and both are made of what is here:

- `ProcessCall`: one function call in a process of its own, which a crash ends and nothing else. It runs a sweep's trials,
  the tries of the largest batch and the gates of a self-test, which differ in multiprocessing's start method alone.
- te_bench.gate.fork_server: two revisions of te-bench at once, each in processes that have imported it and no other, and
  that are told again and again to time a call. No call of a function of this te_bench could be that.
"""

import contextlib
import fcntl
import os
import pickle
import select
import signal
import sys
import termios
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

LOOK_S = 1.0  # between looks for who has ended: a child of a killed process may hold what would tell
ORPHANS_S = 5.0  # for what a fork left to end, once it is killed


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, however it does. On Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def take_signals() -> None:
    """Have a signal do in this fork what it does in a fresh process: a fork begins with its caller's handlers, Ray's say.

    What the caller ignores stays ignored, but SIGTERM, which ends a fork in any case, and SIGCHLD: who ignores that, as
    Ray's workers do, is never told how a process of its own ended (wait(2)), and would wait for it forever.
    """
    for number in signal.valid_signals():
        if number in (signal.SIGTERM, signal.SIGCHLD) or callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def kill_group(pid: int) -> None:
    """Kill the process group that this process leads, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def log_to(path: str, *, append: bool = False) -> None:
    """Have standard output and standard error go to a file, what C libraries print too. Follows no link."""
    flags = os.O_APPEND if append else os.O_TRUNC | os.O_NOFOLLOW
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)


def leave() -> NoReturn:
    """End this process without teardown: freeing a GPU's memory one tensor at a time takes longer than ending it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Ended(Exception):
    """A process ended before it had answered.

    exit_code: the negative number of the signal where one ended it. orphaned: the fork server that started it was killed,
    so that nobody knows how it ended.
    """

    def __init__(self, exit_code: int, *, orphaned: bool = False):
        super().__init__(f"exit code {exit_code}")
        self.exit_code, self.orphaned = exit_code, orphaned


class ProcessCall:
    """function(*arguments) in a process of its own. Both must pickle, but where the context forks.

    Its answer comes by a pipe, whole or not at all. The process is as its context makes it: a function that wants a session
    of its own, or to end with its parent, sees to it. raises: whether what the function raises is raised here, by `result`;
    else it ends the process with exit code 1 and a traceback, as SystemExit does with its own code in any case.
    """

    def __init__(self, context: Any, function: Callable[..., Any], *arguments: Any, raises: bool = True):
        self._reader, self._writer = context.Pipe(duplex=False)
        os.set_blocking(self._reader.fileno(), False)
        self._received = b""
        self._orphaned = False
        self.ended = False
        self.process = context.Process(target=_answer, args=(self._writer, function, arguments, raises))

    def start(self) -> None:
        self.process.start()
        self._writer.close()

    def poll(self) -> bool:
        """Read what it has said so far; whether it has ended."""
        if not self.ended:
            self._orphaned = _orphaned(self.process)  # before is_alive, which reads the exit code
            self.ended = not self.process.is_alive()
        self._read()
        return self.ended

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self._reader.closed:
                data = os.read(self._reader.fileno(), 2**20)
                self._received += data
                if not data:
                    self._reader.close()

    @property
    def waits_for(self) -> list[Any]:
        """What becomes readable when it says something or ends."""
        return [self.process.sentinel, *([] if self._reader.closed else [self._reader])]

    @property
    def answered(self) -> bool:
        size, rest = self._received[:8], self._received[8:]
        return len(size) == 8 and len(rest) == int.from_bytes(size)

    def result(self) -> Any:
        """What the function returned. Raises what it raised, and Ended where the process ended before it had answered."""
        if not self.answered:
            raise Ended(self.process.exitcode or 0, orphaned=self._orphaned)
        succeeded, answer = pickle.loads(self._received[8:])  # our own
        if succeeded:
            return answer
        raise answer

    def kill(self) -> None:
        """End it and its process group, which outlives it while something that it started runs."""
        if self.process.pid is None:  # interrupted before it was started
            return
        kill_group(self.process.pid)
        if self.process.is_alive():  # it leads no group, or not yet
            self.process.kill()
        self.process.join()
        self._read()

    def run(self) -> Any:
        """Start it, wait for its end and return its `result`."""
        try:
            self.start()
            wait_for_any([self])
        finally:
            self.kill()
        return self.result()


def wait_for_any(calls: Sequence[ProcessCall], timeout_s: float = float("inf")) -> list[ProcessCall]:
    """Those of the calls that have ended, as soon as one has; [] when the time is up."""
    until = time.monotonic() + timeout_s
    while True:
        left = until - time.monotonic()
        wait([one for call in calls for one in call.waits_for], max(min(left, LOOK_S), 0.0))
        ended = [call for call in calls if call.poll()]
        if ended or left <= 0:
            return ended


def _answer(writer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], raises: bool) -> NoReturn:
    """In the process: send what the function returns or, where it is asked for, raises."""
    take_signals()
    try:
        answer = pickle.dumps((True, function(*arguments)))
    except (Exception, KeyboardInterrupt) as error:  # of an answer that does not pickle, too
        if not raises:
            raise
        answer = pickle.dumps((False, _picklable(error)))
    with os.fdopen(os.dup(writer.fileno()), "wb") as pipe:
        pipe.write(len(answer).to_bytes(8) + answer)
    leave()


def _picklable(error: BaseException) -> BaseException:
    """The error with where it came from; in its text alone where it does not survive the way."""
    error.add_note(traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))  # our own
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _orphaned(process: Any) -> bool:
    """Whether the fork server ended before it said how this child of it did: the exit code would be made up."""
    if not isinstance(process, ForkServerProcess) or not wait([process.sentinel], timeout=0):
        return False
    unread = fcntl.ioctl(process.sentinel, termios.FIONREAD, bytes(4))  # an int: what there is to read of the exit code
    return not any(unread)


def run_supervised(work: Callable[[], None]) -> str | None:
    """Run `work` in a fork; the name of the signal that ended it, or None.

    Between it and this process is a supervisor, so that nothing that it starts stays, in sessions of its own neither,
    when it ends or this process does.
    """
    ours, theirs = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(theirs)
        _supervise(work, ours)
    os.close(ours)
    _, status = os.waitpid(supervisor, 0)
    os.close(theirs)
    number = abs(os.waitstatus_to_exitcode(status))
    return signal.Signals(number).name if number else None


def _supervise(work: Callable[[], None], caller: int) -> NoReturn:
    """Fork the work; once it or the caller has ended, end all that it left. Exits with the work's signal.

    caller: a pipe that has no other end once the caller is gone.
    """
    take_signals()
    os.setsid()
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what loses its parent becomes this process's child
    worker = os.fork()
    if worker == 0:
        _work(work, caller)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ended, status = os.waitpid(worker, os.WNOHANG)
    while not ended and caller not in select.select([caller, woken], [], [])[0]:
        os.read(woken, 2**10)
        ended, status = os.waitpid(worker, os.WNOHANG)
    if not ended:
        os.kill(worker, signal.SIGKILL)  # it may not have become a group yet
        _, status = os.waitpid(worker, 0)
    kill_group(worker)
    _end_children()
    os._exit(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _work(work: Callable[[], None], caller: int) -> NoReturn:
    os.setsid()  # a process group of its own
    os.close(caller)
    try:
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        leave()


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
