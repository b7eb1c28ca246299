"""Where the processes of both revisions come from: a process that imports what they share, torch above all, and forks them.

So that is imported once a gate and not twice a round, and lies at the same addresses for both.

Run as a program by `paired_trial.ForkServer`. It loads no te_bench, for each revision has its own, but for single files of
the gate's te_bench. Over the socket whose number is its first argument it is sent {"root": a revision's files, "modules":
[...]} with a socket, on which the process that it forks then sends its {"pid"} and what `revision_process.serve` sends.
"""

import contextlib
import gc
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _load_own(name: str, package: str = "gate") -> Any:
    """The module in the gate's own file of that name, whatever te_bench is on the path."""
    path = Path(__file__).resolve().parents[1] / package / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


processes = _load_own("processes", "experiments")


def fork_revisions(requests: socket.socket) -> None:
    """Fork a process for each request, until the gate is gone. They stay zombies, so that no pid means another process."""
    while True:
        message, sockets, _, _ = socket.recv_fds(requests, 2**16, 1)
        if not message:
            return
        parent = os.getpid()
        if os.fork() == 0:
            requests.close()
            processes.end_with_parent(parent)
            _serve_revision(socket.socket(fileno=sockets[0]), **json.loads(message))
            os._exit(0)
        os.close(sockets[0])


def _serve_revision(connection: socket.socket, *, root: str, modules: Sequence[str]) -> None:
    """Import a revision, then serve. Its files come first on the path, here and in what its trials start."""
    os.setsid()
    os.chdir(root)
    sys.path.insert(0, root)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    revision = _load_own("revision_process")
    lines = revision.Lines(connection)
    lines.send(pid=os.getpid())
    try:
        for module in modules:
            __import__(module)
    except Exception as error:  # a revision that cannot be imported
        lines.send(error=f"{type(error).__name__}: {error}")
        return
    import te_bench

    lines.send(answer=te_bench.__file__)
    make_clock, plant = _load_own("interleaved_clock").make_clock, _load_own("planted_faults").plant
    revision.serve(lines, make_clock=make_clock, plant=plant, run_supervised=processes.run_supervised)


def main() -> None:
    """fork_server.py SOCKET PARENT LOG [MODULE ...]: import the modules, then fork revisions."""
    number, parent, log, *modules = sys.argv[1:]
    processes.end_with_parent(int(parent))
    os.setsid()  # Ctrl-C is the gate's to handle
    processes.log_to(log, append=True)
    # Importing torch's compiler asks whether there is a GPU: by the management library, or CUDA would not survive the fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    gc.disable()  # it would look at all that is imported again and again
    for module in modules:
        with contextlib.suppress(Exception):  # a revision that needs it will say so
            __import__(module)
    gc.collect()
    gc.freeze()  # else every fork's collector would copy the pages of all this
    gc.enable()
    fork_revisions(socket.socket(fileno=int(number)))


if __name__ == "__main__":
    main()
