"""The process that runs commands of two revisions for a live gate, one at a time, and times them.

Run as a program by `commands.CommandRunner`. It is small, so that a command is started fast and its peak memory is its
own: a process begins with its parent's. Over the socket whose number is its first argument it is asked for the arguments of
`_run`, and answers {"result": {...}}, then {"ended": SIGNAL or null}.
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

_KIB = 1024  # of Linux's ru_maxrss; elsewhere it is in bytes


def _run(
    lines: Lines, words: list[str], directory: str, env: dict[str, str], timeout_s: float, output: str, timed: bool
) -> None:
    """Run a command to its end: its seconds of the wall, how it ended, and its peak resident memory in bytes."""
    with Path(output).open("wb") as file:
        began = time.perf_counter()
        try:
            child = subprocess.Popen(
                words,
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            lines.send(result={"failed": f"cannot be started: {error.filename}: {error.strerror}"})
            return
        if timed:
            raise_priority(child.pid)
        end = threading.Timer(timeout_s, kill_group, (child.pid,))  # Popen.wait looks every 50 ms only
        end.start()
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - began
        end.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
    rss = usage.ru_maxrss * (_KIB if sys.platform == "linux" else 1)
    late = seconds >= timeout_s
    lines.send(result={"seconds": seconds, "code": child.returncode, "late": late, "peak_rss_bytes": rss})


def main() -> None:
    """command_process.py SOCKET PARENT LOG: run commands until the gate is gone."""
    number, parent, log = sys.argv[1:]
    end_with_parent(int(parent))
    os.setsid()  # Ctrl-C is the gate's to handle
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
