"""A Ctrl-C that Python drops arrives again.

Where it comes within a finaliser or a callback of the import system, Python prints "Exception ignored in" and goes on. Of
136 starts of te-bench on a busy machine one ran its whole sweep so.
"""

import signal
import sys
import threading
from typing import Any

AGAIN_S = 0.05  # by then the finaliser has returned

_usual = sys.unraisablehook


def exit_code(interrupt: BaseException | None) -> int:
    """128 and the number of the signal, as a shell has it: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + _number(interrupt)


def _number(interrupt: BaseException | None) -> int:
    return int(interrupt.args[0]) if interrupt and interrupt.args else signal.SIGINT


def _deliver_again(unraisable: Any) -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        _usual(unraisable)
        return
    main = threading.main_thread().ident
    timer = threading.Timer(
        AGAIN_S, signal.pthread_kill, (main, _number(unraisable.exc_value))
    )  # which ends a wait there, too
    timer.daemon = True
    timer.start()


sys.unraisablehook = _deliver_again
