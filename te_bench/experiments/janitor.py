"""Temporary folders that are gone whenever this process is, however it ends."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

#: Waits on its standard input, which this process holds open; then removes the folder, while dying processes write to it.
_JANITOR = """
import shutil, sys, time
sys.stdin.buffer.read()
for _ in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.05)
    try:
        open(sys.argv[1]).close()
    except IsADirectoryError:
        continue
    except FileNotFoundError:
        break
"""


@contextlib.contextmanager
def remove_at_end(folder: Path) -> Iterator[None]:
    """Remove the folder at the end. A second process does when this one ends before that, be it by SIGKILL.

    A fork of this process removes nothing, though it frees its copy of this context: multiprocessing's children do at once.
    """
    owner = os.getpid()
    janitor = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _JANITOR, str(folder)],
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
