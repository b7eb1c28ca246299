"""A process that ends whenever its parent does, however that ends. Imports nothing of te_bench."""

import os
import signal
import sys


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, by whatever. Linux only; elsewhere the socket's end tells it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
