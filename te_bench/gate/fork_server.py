"""A process that imports what both revisions share, above all torch, and forks the processes of both revisions.

So a gate imports torch once, not twice a round, and torch lies at the same addresses for both revisions.

`paired_trial.ForkServer` runs it as a program. It does not import te_bench, because each revision has its own; it loads
single files of the gate's te_bench. Its first argument is the number of a socket. A request there is {"root": a revision's
files, "modules": [...]} with another socket, on which the forked process sends {"pid"} and then what
`revision_process.serve` sends.
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
    """Load a module from the gate's own files, whichever te_bench is on the path."""
    path = Path(__file__).resolve().parents[1] / package / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


processes = _load_own("processes", "experiments")


def fork_revisions(requests: socket.socket) -> None:
    """Fork a process for each request, until the gate ends. Children stay zombies, so no pid is ever reused."""
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
    """Import a revision, then serve. Its files come first on the path, here and in the processes that its trials start."""
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
    except Exception as error:  # the revision cannot be imported
        lines.send(error=f"{type(error).__name__}: {error}")
        return
    import te_bench

    lines.send(answer=te_bench.__file__)
    make_clock, plant = _load_own("interleaved_clock").make_clock, _load_own("planted_faults").plant
    revision.serve(lines, make_clock=make_clock, plant=plant, run_supervised=processes.run_supervised)


def main() -> None:
    """fork_server.py SOCKET PARENT LOG [MODULE ...]: import the modules, then fork processes for revisions."""
    number, parent, log, *modules = sys.argv[1:]
    processes.end_with_parent(int(parent))
    os.setsid()  # only the gate handles Ctrl-C
    processes.log_to(log, append=True)
    # Importing torch's compiler asks for a GPU. Asking CUDA, not NVML, would break CUDA in the forked processes.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    gc.disable()  # the imports allocate much, which the collector would scan again and again
    for module in modules:
        with contextlib.suppress(Exception):  # a revision that needs the module reports the error
            __import__(module)
    gc.collect()
    gc.freeze()  # else the collector of every fork would copy the pages of all these objects
    gc.enable()
    fork_revisions(socket.socket(fileno=int(number)))


if __name__ == "__main__":
    main()
