"""The process that runs and times commands of two revisions for a live gate, one at a time.

`commands.CommandRunner` runs it as a program. It stays small so that commands start fast, and because a child process
begins with its parent's peak memory. Its first argument is the number of a socket. Each request there holds the
arguments of `_run`; the answers are {"result": {...}}, then {"ended": SIGNAL or null}.
"""

import functools
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from te_bench.experiments.processes import end_with_parent, kill_group, log_to, run_supervised
from te_bench.gate.revision_process import Lines, raise_priority

_KIB = 1024  # ru_maxrss is in KiB on Linux, in bytes elsewhere


def _run(
    lines: Lines, words: list[str], directory: str, env: dict[str, str], timeout_s: float, output: str, timed: bool
) -> None:
    """Run a command to its end. Send its wall time in seconds, exit code and peak resident memory in bytes."""
    try:
        with Path(output).open("wb") as file:
            began = time.perf_counter()
            child = subprocess.Popen(
                words,
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:  # ValueError: words or env that no process can have
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        lines.send(result={"failed": f"cannot be started: {said}"})
        return
    if timed:
        raise_priority(child.pid)
    end = threading.Timer(timeout_s, kill_group, (child.pid,))  # Popen.wait polls only every 50 ms
    end.start()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    end.cancel()
    child.returncode = os.waitstatus_to_exitcode(status)
    rss = usage.ru_maxrss * (_KIB if sys.platform == "linux" else 1)
    late = seconds >= timeout_s
    lines.send(result={"seconds": seconds, "code": child.returncode, "late": late, "peak_rss_bytes": rss})


def main() -> None:
    """command_process.py SOCKET PARENT LOG: run commands until the gate ends."""
    number, parent, log = sys.argv[1:]
    end_with_parent(int(parent))
    os.setsid()  # only the gate handles Ctrl-C
    log_to(log, append=True)
    lines = Lines(socket.socket(fileno=int(number)))
    while True:
        try:
            message = lines.receive()
        except EOFError:
            return
        lines.send(ended=run_supervised(functools.partial(_run, lines, **message)))


if __name__ == "__main__":
    main()
