"""Run te-bench as a user does, in a process of its own, and find whatever it left running."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

PLANTED = Path(__file__).parent / "experiments" / "planted" / "te_bench_planted.py"
#: Environment variables of a te-bench whose trials compute nothing: its torch is none, whose import takes no two seconds.
IDLE = {"PYTHONPATH": os.pathsep.join([str(PLANTED.parent / "without_torch"), os.environ["PYTHONPATH"]])}
MARK = "TE_BENCH_TEST_RUN"  # in the environment of a run and, inherited, of every process it starts


class Run:
    """A te-bench process in a session of its own."""

    def __init__(self, *arguments: object, main: Path | None = PLANTED, **options: Any):
        self.mark = uuid.uuid4().hex
        start = [sys.executable, *(["-m", "te_bench.cli"] if main is None else [str(main)])]
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "120", **options.pop("env", {}), MARK: self.mark}
        self.process = subprocess.Popen(
            [*start, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
            **options,
        )

    def finish(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        out, err = self.process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def family(self) -> list[psutil.Process]:
        """Every living process that this run started, itself included, wherever its parents went."""
        return [process for process in psutil.process_iter() if _carries(process, self.mark)]

    def named(self, name: str) -> list[psutil.Process]:
        """Those of the family that are called so."""
        found = []
        for process in self.family():
            with suppress(psutil.Error):  # it has just ended
                found += [process] if process.name() == name else []
        return found

    def gone(self, seconds: float = 20.0) -> bool:
        """True once nothing of this run is alive."""
        return eventually(lambda: not self.family(), seconds)


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


@contextmanager
def running(*arguments: object, **options: Any) -> Iterator[Run]:
    """A run whose whole family is killed at the end, whatever a test found."""
    run = Run(*arguments, **options)
    try:
        yield run
    finally:
        for process in run.family():
            with suppress(psutil.Error):
                process.kill()
        run.process.communicate(timeout=30)


def te_bench(*arguments: object, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run te-bench to its end, without the planted workloads unless `main` says so."""
    options.setdefault("main", None)
    with running(*arguments, **options) as run:
        return run.finish(timeout)


def eventually(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.02)
    return true()


def rows(directory: Path) -> list[dict[str, Any]]:
    """The records of a journal in the order they were written, every one; no te-bench code reads them."""
    path = directory / "journal.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [value["body"] for value in map(json.loads, lines) if value["kind"] == "record"]
