"""What the fork server of `runner` imports, once for all its trials; first of all it sees to it that it dies with te-bench.

By itself it looks for te-bench's end only once everything is imported, seconds later, on a busy machine many.
"""

import contextlib
import gc
import importlib
import os
import signal

_at_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is te-bench's, which ends this; else a traceback
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # `runner` starts it so, for the time before this line

from te_bench.experiments import processes, runner  # noqa: E402

processes.end_with_parent(int(os.environ[runner.RUNNER]))
SERVER = os.getpid()  # which the fork server's children inherit

gc.disable()  # a fifth of the time: of the 350,000 objects that it looked at again and again, all stay
for _module in os.environ.get(runner.PRELOADED, "").split():
    with contextlib.suppress(Exception):  # of which the server would die, and no trial begin: each trial says so itself
        importlib.import_module(_module)
gc.freeze()  # for the children too: a collection that looks at them takes 0.2 s
gc.enable()
signal.signal(signal.SIGINT, _at_interrupt)  # from here on the fork server sees to it
