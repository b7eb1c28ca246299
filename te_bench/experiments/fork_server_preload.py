"""The fork server of `runner` imports this module once for all its trials. First, it makes the server end with te-bench.

Without that, the server would notice te-bench's end only after all imports, seconds later or more.
"""

import contextlib
import gc
import importlib
import os
import signal

_at_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # te-bench handles Ctrl-C and ends this server
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # `runner` starts the server with Ctrl-C blocked

from te_bench.experiments import processes, runner  # noqa: E402

processes.end_with_parent(int(os.environ[runner.RUNNER]))
SERVER = os.getpid()  # the server's children inherit this value

gc.disable()  # the collector scanned 350,000 lasting objects again and again, for a fifth of the time
for _module in os.environ.get(runner.PRELOADED, "").split():
    with contextlib.suppress(Exception):  # would end the server; each trial reports the error itself
        importlib.import_module(_module)
gc.freeze()  # for the children too: scanning these objects takes 0.2 s
gc.enable()
signal.signal(signal.SIGINT, _at_interrupt)  # from here on the fork server handles it
