"""Processes that run one function and end: with their parent, in time, with all their children. Imports no te_bench.

te-bench has two engines, and both use this module:

- `ProcessCall`: one function call in its own process, so that a crash ends nothing else. It runs a sweep's trials, the tries
  of the largest batch and the gates of a self-test, which differ only in multiprocessing's start method.
- te_bench.gate.fork_server: two revisions of te-bench at once, in processes that have each imported one revision and time
  calls on request. A function call of this te_bench cannot do that.
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

LOOK_S = 1.0  # between checks for ended processes: a child of a killed process may hold the pipe that would tell
ORPHANS_S = 5.0  # for the leftover children of a killed fork to end


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, however it ends. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


def take_signals() -> None:
    """Reset signal handlers to those of a fresh process: a fork inherits its caller's handlers, such as Ray's.

    Signals that the caller ignores stay ignored, except SIGTERM, which must end a fork, and SIGCHLD: a process that ignores
    SIGCHLD, like Ray's workers, never learns how its children ended (wait(2)), and would wait for them forever.
    """
    for number in signal.valid_signals():
        if number in (signal.SIGTERM, signal.SIGCHLD) or callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def kill_group(pid: int) -> None:
    """Kill the process group that this process leads, if any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def log_to(path: str, *, append: bool = False) -> None:
    """Send standard output and standard error to a file, including what C libraries print. Follow no link."""
    flags = os.O_APPEND if append else os.O_TRUNC | os.O_NOFOLLOW
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)


def leave() -> NoReturn:
    """End this process without teardown, which would free a GPU's memory one tensor at a time and take longer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Ended(Exception):
    """A process ended before it answered.

    exit_code: minus the signal's number if a signal ended it. orphaned: the fork server that started it was killed, so its
    real exit code is unknown.
    """

    def __init__(self, exit_code: int, *, orphaned: bool = False):
        super().__init__(f"exit code {exit_code}")
        self.exit_code, self.orphaned = exit_code, orphaned


class ProcessCall:
    """function(*arguments) in its own process. Both must pickle, unless the context forks.

    The answer comes through a pipe, whole or not at all. The context decides how the process starts; a function that needs
    its own session, or must end with its parent, arranges that itself. raises: `result` raises what the function raises;
    otherwise the process ends with exit code 1 and a traceback. SystemExit always ends it with its own code.
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
        """Read what has arrived so far; return whether the process has ended."""
        if not self.ended:
            self._orphaned = _orphaned(self.process)  # before is_alive, which consumes the exit code
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
        """Return the objects that become readable when the process answers or ends."""
        return [self.process.sentinel, *([] if self._reader.closed else [self._reader])]

    @property
    def answered(self) -> bool:
        size, rest = self._received[:8], self._received[8:]
        return len(size) == 8 and len(rest) == int.from_bytes(size)

    def result(self) -> Any:
        """Return what the function returned. Raise what it raised, or Ended if the process ended without an answer."""
        if not self.answered:
            raise Ended(self.process.exitcode or 0, orphaned=self._orphaned)
        succeeded, answer = pickle.loads(self._received[8:])  # trusted: our own process wrote it
        if succeeded:
            return answer
        raise answer

    def kill(self) -> None:
        """End the process and its group, which outlives the process while its children run."""
        if self.process.pid is None:  # interrupted before the start
            return
        kill_group(self.process.pid)
        if self.process.is_alive():  # it leads no group (yet)
            self.process.kill()
        self.process.join()
        self._read()

    def run(self) -> Any:
        """Start the process, wait for its end and return its `result`."""
        try:
            self.start()
            wait_for_any([self])
        finally:
            self.kill()
        return self.result()


def wait_for_any(calls: Sequence[ProcessCall], timeout_s: float = float("inf")) -> list[ProcessCall]:
    """Return the ended calls as soon as one has ended; [] when the time is up."""
    until = time.monotonic() + timeout_s
    while True:
        left = until - time.monotonic()
        wait([one for call in calls for one in call.waits_for], max(min(left, LOOK_S), 0.0))
        ended = [call for call in calls if call.poll()]
        if ended or left <= 0:
            return ended


def _answer(writer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], raises: bool) -> NoReturn:
    """In the process: send what the function returns or, if asked for, what it raises."""
    take_signals()
    try:
        answer = pickle.dumps((True, function(*arguments)))
    except (Exception, KeyboardInterrupt) as error:  # also if the answer does not pickle
        if not raises:
            raise
        answer = pickle.dumps((False, _picklable(error)))
    with os.fdopen(os.dup(writer.fileno()), "wb") as pipe:
        pipe.write(len(answer).to_bytes(8) + answer)
    leave()


def _picklable(error: BaseException) -> BaseException:
    """Return the error with its traceback as a note; a RuntimeError with the same text if it does not pickle."""
    error.add_note(traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))  # trusted: just written
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _orphaned(process: Any) -> bool:
    """Return whether the fork server ended before it reported this child's exit code, which would then be wrong."""
    if not isinstance(process, ForkServerProcess) or not wait([process.sentinel], timeout=0):
        return False
    unread = fcntl.ioctl(process.sentinel, termios.FIONREAD, bytes(4))  # an int: unread bytes of the exit code
    return not any(unread)


def run_supervised(work: Callable[[], None]) -> str | None:
    """Run `work` in a fork; return the name of the signal that ended it, or None.

    A supervisor between the fork and this process ends all of the fork's children, also those in their own sessions, when
    the fork or this process ends.
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
    """Fork the work; once the work or the caller has ended, end its children. Exit with the work's signal.

    caller: a pipe whose other end closes when the caller ends.
    """
    take_signals()
    os.setsid()
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become this process's children
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
        os.kill(worker, signal.SIGKILL)  # it may not lead a group yet
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
    """Kill this process's children until none is left: children of a killed one become this process's."""
    until = time.monotonic() + ORPHANS_S
    while time.monotonic() < until:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            for stat in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():  # the parent's id, proc(5)
                        os.kill(int(stat.parent.name), signal.SIGKILL)
            time.sleep(1e-3)
