"""Measurements side by side: who runs where, and that nothing outlives a failure, Ctrl-C or a kill."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from driving import eventually

from te_bench.experiments import host
from te_bench.gate.places import Place, places, run_each

CORES = sorted(os.sched_getaffinity(0))
TWO = [Place((CORES[0],), "a"), Place((CORES[-1],), "b")]


def test_places_share_no_core_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3, 5, 4, 6}, raising=False)
    monkeypatch.setattr(host, "cores", lambda: 5)
    assert places(2, device="cpu") == [Place((3, 4)), Place((5, 6))]
    assert places(2, device="cuda", gpus=["x", "y", "z"]) == [Place((3, 4), "x"), Place((5, 6), "y")]
    assert places(1, device="cuda", gpus=["x", "y"]) == [Place(gpu="x")]
    assert places(1, device="cpu") == [Place()]
    own = "and there are"
    wrong = ((0, "cpu", "give 1 or more"), (6, "cpu", f"its own core, {own} 5"), (2, "cuda", f"its own GPU, {own} 1"))
    for count, device, why in wrong:
        with pytest.raises(ValueError, match=f"--at-once {count}: .*{why}"):
            places(count, device=device, gpus=["x"] if device == "cuda" else [])


def at_a_place(folder: Path, task: int, place: Place) -> tuple[int, int, set[int], Place]:
    """What a task is told, once as many have begun as there are places."""
    (folder / str(task)).touch()
    assert eventually(lambda: len(list(folder.iterdir())) >= 2, 60)
    return task, os.getpid(), os.sched_getaffinity(0), place


def test_each_task_is_done_once_side_by_side_on_the_cores_of_its_place(tmp_path: Path) -> None:
    found = list(run_each(partial(at_a_place, tmp_path), range(5), TWO))
    assert sorted(task for task, *_ in found) == [0, 1, 2, 3, 4]
    assert {pid for _, pid, *_ in found} & {os.getpid()} == set()
    assert all(cores == set(place.cores) for *_, cores, place in found)
    assert {place for *_, place in found} == set(TWO)


def test_one_place_is_this_process() -> None:
    assert list(run_each(told, ["a"], [Place(gpu="x")])) == [(os.getpid(), "a", "x")]


def told(task: str, place: Place) -> tuple[int, str, str | None]:
    return os.getpid(), task, place.gpu


def asked(task: str, place: Place) -> str:
    """Sleep for long, or fail once the other sleeps."""
    what, _, file = task.partition(" ")
    if what == "sleep":
        Path(file).write_text(str(os.getpid()))
        time.sleep(600)
    assert eventually(Path(file).exists, 60)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "orphan":
        if not os.fork():
            time.sleep(10)
            os._exit(0)
        os._exit(7)
    if what == "linger":
        threading.Thread(target=time.sleep, args=(30,)).start()
    if what == "refuse":
        raise ValueError("no such suite")
    if what == "leave":
        sys.exit("no such revision")
    if what == "unread":
        raise Unread("no such", "way back")
    if what == "unsent":
        return threading.Lock()  # type: ignore[return-value]
    return what


class Unread(Exception):
    """What pickles and does not unpickle."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


@pytest.mark.parametrize(
    ("what", "error", "why"),
    [
        ("refuse", ValueError, "no such suite"),
        ("leave", ValueError, "exit code 1.* lower --at-once"),
        ("unread", RuntimeError, r"(?s)in asked.*no such"),
        ("unsent", TypeError, "cannot pickle"),
        ("kill", ValueError, r"exit code -9.* lower --at-once"),
        ("orphan", ValueError, "exit code 7.* lower --at-once"),
    ],
)
def test_a_failure_is_told_and_ends_the_others(tmp_path: Path, what: str, error: type[BaseException], why: str) -> None:
    began = time.monotonic()
    with pytest.raises(error, match=why):
        list(run_each(asked, [f"sleep {tmp_path}/pid", f"{what} {tmp_path}/pid"], TWO))
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert time.monotonic() - began < 60  # of the sleeper's 600 s


def test_who_would_leave_slowly_holds_no_answer() -> None:
    began = time.monotonic()
    assert sorted(run_each(asked, ["linger /", "answer /"], TWO)) == ["answer", "linger"]
    assert time.monotonic() - began < 20  # of the thread's 30 s


def test_without_a_task_nothing_is_run() -> None:
    assert list(run_each(told, [], TWO)) == []


def test_what_else_its_caller_runs_is_left_alone(tmp_path: Path) -> None:
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    other.start()
    try:
        with pytest.raises(ValueError, match="no such suite"):
            list(run_each(asked, [f"sleep {tmp_path}/pid", f"refuse {tmp_path}/pid"], TWO))
        other.join(1)  # what is killed takes a while
        assert other.is_alive()
    finally:
        other.kill()
        other.join()


def test_a_caller_that_wants_no_more_waits_for_none(tmp_path: Path) -> None:
    answers = run_each(asked, [f"sleep {tmp_path}/pid", f"answer {tmp_path}/pid", "answer /"], TWO)
    assert next(answers) == "answer"
    answers.close()  # type: ignore[attr-defined]
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_they_end_with_their_caller(tmp_path: Path, number: signal.Signals) -> None:
    source = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        f"from test_places import TWO, asked, run_each\n"
        f"if __name__ == '__main__': list(run_each(asked, ['sleep {tmp_path}/0', 'sleep {tmp_path}/1'], TWO))\n"
    )
    (tmp_path / "caller.py").write_text(source)
    files = [tmp_path / "0", tmp_path / "1"]
    with subprocess.Popen([sys.executable, tmp_path / "caller.py"], stderr=subprocess.DEVNULL) as caller:
        assert eventually(lambda: all(file.exists() and file.read_text() for file in files), 60)
        caller.send_signal(number)
        assert caller.wait(20) in (-number, 1)
    assert eventually(lambda: not any(psutil.pid_exists(int(file.read_text())) for file in files), 10)
