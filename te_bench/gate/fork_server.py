"""Where both sides of a live gate come from: a process that imports what they share, torch above all, and forks them.

So that is imported once a gate and not twice a round, where with planning it took 7 s of 19.5 (`quick`, two quiet cores,
2026-11-21), and lies at the same addresses on both sides.

Run as a program by `pairs.Origin`. It loads no te_bench, for each side has its own, but for the files side.py, turns.py and
planted.py beside it. Over the socket whose number is its first argument it is sent {"root": a revision's files, "modules":
[...]} with a socket, on which the side that it forks then says its {"pid"}, what `side.serve` says, and nothing of another
side.
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


def _gates_own(name: str, package: str = "gate") -> Any:
    """The module in the gate's own file of that name, whatever te_bench is on the path."""
    path = Path(__file__).resolve().parents[1] / package / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


end_with_parent = _gates_own("orphans", "experiments").end_with_parent


def fork_sides(asked: socket.socket) -> None:
    """Fork a side for each message, until the gate is gone. They stay zombies, so that no pid means another process."""
    while True:
        message, sockets, _, _ = socket.recv_fds(asked, 2**16, 1)
        if not message:
            return
        parent = os.getpid()
        if os.fork() == 0:
            asked.close()
            end_with_parent(parent)
            _side(socket.socket(fileno=sockets[0]), **json.loads(message))
            os._exit(0)
        os.close(sockets[0])


def _side(connection: socket.socket, *, root: str, modules: Sequence[str]) -> None:
    """Import a revision, then serve. Its files come first on the path, here and in what its trials start."""
    os.setsid()
    os.chdir(root)
    sys.path.insert(0, root)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    side, clock, faults = (_gates_own(name) for name in ("revision_process", "interleaved_clock", "planted_faults"))
    lines = side.Lines(connection)
    lines.send(pid=os.getpid())
    try:
        for module in modules:
            __import__(module)
    except Exception as error:  # a revision that cannot be imported
        lines.send(error=f"{type(error).__name__}: {error}")
        return
    import te_bench

    lines.send(answer=te_bench.__file__)
    side.serve(lines, clock.clock, faults.planted)


def main() -> None:
    """origin.py SOCKET PARENT LOG [MODULE ...]: import the modules, then fork sides."""
    number, parent, log, *modules = sys.argv[1:]
    end_with_parent(int(parent))
    os.setsid()  # Ctrl-C is the gate's to handle
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # Importing torch's compiler asks whether there is a GPU: by the management library, or CUDA would not survive the fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for module in modules:
        with contextlib.suppress(Exception):  # a revision that needs it will say so
            __import__(module)
    gc.collect()
    gc.freeze()  # else every fork's collector would copy the pages of all this
    fork_sides(socket.socket(fileno=int(number)))


if __name__ == "__main__":
    main()
