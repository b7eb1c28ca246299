"""Remove temporary folders and processes when this process ends, however it ends."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

#: The program waits on its standard input, which this process holds open. Then it kills all processes with the mark in their
#: environment, in at least two passes because a process lacks the mark while it executes a new program, and removes the
#: folder, repeatedly while dying processes write to it.
_JANITOR = """
import os, shutil, sys, time
folder, mark = sys.argv[1], sys.argv[2].encode()
sys.stdin.buffer.read()

def carries(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as environment:
            return mark in environment.read().split(bytes(1))
    except OSError:
        return False

quiet = 0
for _ in range(100):
    marked = [pid for pid in os.listdir("/proc") if pid.isdigit() and carries(pid)] if mark else []
    for pid in marked:
        try:
            os.kill(int(pid), 9)
        except OSError:
            pass
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(0.05)
    quiet = 0 if marked or os.path.isdir(folder) else quiet + 1
    if quiet > bool(mark):
        break
"""


@contextlib.contextmanager
def remove_at_end(folder: Path, mark: str = "") -> Iterator[None]:
    """Remove the folder at the end of the block. A second process removes it if this one ends earlier, even by SIGKILL.

    A fork of this process removes nothing, although it frees its copy of this context, as multiprocessing's children do.
    mark: NAME=VALUE, an environment variable unique to this folder; processes started with it are killed first (Linux).
    """
    owner = os.getpid()
    janitor = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _JANITOR, str(folder), mark],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C at the terminal must not reach it
    )
    try:
        yield
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
            assert janitor.stdin is not None
            janitor.stdin.close()
            janitor.wait()
