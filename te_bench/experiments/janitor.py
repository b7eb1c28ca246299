"""Temporary folders and processes that are gone whenever this process is, however it ends."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

#: Waits on its standard input, which this process holds open; then kills whose environment holds the mark, which a process
#: is without while it begins a program, so twice; and removes the folder, while dying processes write to it.
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
    """Remove the folder at the end. A second process does when this one ends before that, be it by SIGKILL.

    A fork of this process removes nothing, though it frees its copy of this context: multiprocessing's children do at once.
    mark: NAME=VALUE, an environment variable of this folder's own: what was started with it is killed first (on Linux).
    """
    owner = os.getpid()
    janitor = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _JANITOR, str(folder), mark],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C at the terminal is not for it
    )
    try:
        yield
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
            assert janitor.stdin is not None
            janitor.stdin.close()
            janitor.wait()
