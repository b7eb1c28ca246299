"""Deliver a Ctrl-C again that Python dropped.

A Ctrl-C within a finaliser or a callback of the import system is lost: Python prints "Exception ignored in" and continues.
Of 136 starts of te-bench on a busy machine, one then ran its whole sweep.
"""

import signal
import sys
import threading
from typing import Any

AGAIN_S = 0.05  # seconds; the finaliser has returned by then

_usual = sys.unraisablehook


def exit_code(interrupt: BaseException | None) -> int:
    """Return 128 + the signal's number, as a shell does: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + _number(interrupt)


def _number(interrupt: BaseException | None) -> int:
    return int(interrupt.args[0]) if interrupt and interrupt.args else signal.SIGINT


def _deliver_again(unraisable: Any) -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        _usual(unraisable)
        return
    main = threading.main_thread().ident
    # pthread_kill also ends a blocking wait of the main thread
    timer = threading.Timer(AGAIN_S, signal.pthread_kill, (main, _number(unraisable.exc_value)))
    timer.daemon = True
    timer.start()


sys.unraisablehook = _deliver_again
