"""One call in one process: its answer comes whole, its error as it was, its end by the exit code, whatever starts it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from te_bench.experiments.janitor import remove_at_end
from te_bench.experiments.processes import Ended, ProcessCall, run_supervised, wait_for_any

CONTEXTS = ("fork", "forkserver", "spawn")


def answer(what: str) -> bytes:
    """More than a pipe holds, or an end."""
    if what == "raises":
        raise KeyError(what)
    if what == "exits":
        raise SystemExit(3)
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGTERM)
    if what == "sleeps":
        time.sleep(600)
    return b"x" * 2**20


def call(start_method: str, what: str, *, raises: bool = True) -> ProcessCall:
    return ProcessCall(multiprocessing.get_context(start_method), answer, what, raises=raises)


@pytest.mark.parametrize("start_method", CONTEXTS)
def test_a_call_is_told_whole(start_method: str) -> None:
    assert call(start_method, "answers").run() == b"x" * 2**20
    with pytest.raises(KeyError, match="raises"):
        call(start_method, "raises").run()


@pytest.mark.parametrize("start_method", CONTEXTS)
@pytest.mark.parametrize(("what", "code"), [("raises", 1), ("exits", 3), ("is killed", -signal.SIGTERM)])
def test_an_end_without_an_answer_has_its_exit_code(start_method: str, what: str, code: int) -> None:
    with pytest.raises(Ended) as end:
        call(start_method, what, raises=False).run()
    assert (end.value.exit_code, end.value.orphaned) == (code, False)


def test_who_is_waited_for_in_vain_can_be_killed() -> None:
    sleeper = call("fork", "sleeps")
    sleeper.start()
    began = time.monotonic()
    assert wait_for_any([sleeper], 0.2) == []
    assert 0.2 <= time.monotonic() - began < 60  # of the sleeper's 600 s
    sleeper.kill()
    with pytest.raises(Ended) as end:
        sleeper.result()
    assert end.value.exit_code == -signal.SIGKILL


def test_a_supervised_fork_says_which_signal_ended_it() -> None:
    assert run_supervised(lambda: None) is None
    assert run_supervised(lambda: os.kill(os.getpid(), signal.SIGTERM)) == "SIGTERM"


def exits(number: int, frame: Any) -> None:
    """What Ray has a process do at SIGTERM that has started a node or called ray.init."""
    sys.exit(number)


@pytest.fixture
def handled() -> Iterator[Callable[[int, Any], None]]:
    """handled(number, handler): what this process does at a signal, until the test's end."""
    before = {}

    def handle(number: int, handler: Any) -> None:
        before[number] = signal.signal(number, handler)

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("handler", [exits, signal.SIG_IGN])
def test_sigterm_ends_a_fork_whatever_it_does_to_who_forked(handler: Any, handled: Callable[[int, Any], None]) -> None:
    handled(signal.SIGTERM, handler)
    assert run_supervised(lambda: os.kill(os.getpid(), signal.SIGTERM)) == "SIGTERM"
    with pytest.raises(Ended) as end:
        call("fork", "is killed").run()
    assert end.value.exit_code == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_fork_has_no_handler_of_who_forked_and_ignores_what_that_does(handled: Callable[[int, Any], None]) -> None:
    handled(signal.SIGUSR1, exits)
    handled(signal.SIGUSR2, signal.SIG_IGN)
    handled(signal.SIGINT, exits)
    assert run_supervised(lambda: os.kill(os.getpid(), signal.SIGUSR1)) == "SIGUSR1"
    assert run_supervised(lambda: os.kill(os.getpid(), signal.SIGUSR2)) is None
    with pytest.raises(KeyboardInterrupt):
        ProcessCall(multiprocessing.get_context("fork"), signal.raise_signal, signal.SIGINT).run()


def a_call_in_a_call() -> bytes:
    return call("fork", "answers").run()


def test_a_call_sees_its_own_calls_end_where_signals_of_children_are_ignored() -> None:
    """As Ray's workers ignore them, whose trials over ranks would else never end. The fork server inherits it."""
    ignoring = (
        "import multiprocessing, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); import test_processes as t; "
    )
    ignoring += "print(len(t.ProcessCall(multiprocessing.get_context('forkserver'), t.a_call_in_a_call).run()))"
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])}
    how = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, "env": {**os.environ, **paths}}
    with subprocess.Popen([sys.executable, "-c", ignoring], **how) as process:
        try:
            assert process.communicate(timeout=60)[0] == f"{2**20}\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_fork_frees_its_copy_of_a_temporary_folder_and_removes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    owner = remove_at_end(folder)
    with owner:
        assert run_supervised(lambda: owner.__exit__(None, None, None)) is None
        assert folder.is_dir()
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_processes_that_carry_a_folders_mark_end_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    sleep = ["sleep", "600"]
    with remove_at_end(folder, f"OF={folder}"):
        marked, other = (
            subprocess.Popen(sleep, env={"PATH": os.environ["PATH"], "OF": of}) for of in (str(folder), f"{folder}2")
        )
    assert (marked.wait(10), other.poll()) == (-signal.SIGKILL, None)
    other.kill()
    other.wait()
