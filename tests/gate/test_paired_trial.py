"""What the processes of a live gate's pairs are given."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
from driving import eventually

from te_bench.experiments.spec import Trial
from te_bench.gate import paired_trial

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: Of 128 MiB that are written to, the kB in huge pages.
IN_HUGE_PAGES = """
import re
kept = bytearray(2**27)
print(re.search(r"AnonHugePages: *(\\d+)", open("/proc/self/smaps_rollup").read())[1])
"""


def environment_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
def test_what_the_user_says_of_memory_and_threads_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired_trial, "SHARED", ())
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    two = {"OMP_NUM_THREADS": "2"}
    for device, expected in (("cpu", paired_trial.ONE_THREAD | two), ("cuda", two)):
        server = paired_trial.ForkServer(tmp_path / "log", device=device)
        try:
            assert eventually(lambda pid=server.process.pid: environment_of(pid), 5.0)  # it has none until it has begun
            found = environment_of(server.process.pid)
        finally:
            server.close()
        ones = paired_trial.ONE_THREAD
        assert {name: found.get(name) for name in ones} == dict.fromkeys(ones) | expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a process has no cores of its own")
def test_both_revisions_of_a_round_have_one_core_and_the_next_round_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 8})

    def core(seed: int, device: str = "cpu") -> int | None:
        trial = Trial(
            workload="train_step",
            device=device,
            problem={},
            attention="flash",
            precision="fp32",
            protocol="once",
            seed=seed,
        )
        return paired_trial.choose_core({"base": trial.to_json(), "head": trial.to_json()})

    monkeypatch.setattr(os, "getpid", lambda: 10)
    assert [core(seed) for seed in range(4)] == [3, 8, 3, 8]
    monkeypatch.setattr(os, "getpid", lambda: 11)  # of a gate begun right after
    assert [core(seed) for seed in range(4)] == [8, 3, 8, 3]
    assert core(0, "cuda") is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # they would share it
    assert core(0) is None


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not HUGE.exists() or "[never]" in HUGE.read_text(), reason="no huge pages"
)
def test_memory_lies_in_huge_pages() -> None:
    run = [sys.executable, "-c", IN_HUGE_PAGES]
    env = {**os.environ, **paired_trial.ONE_THREAD}
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 2**16  # half of it: a machine may be short of huge pages


class Waiting:
    """A revision whose calls take 0.1 ms by their own clock and keep it waiting for `waits` seconds each."""

    def __init__(self, waits: float):
        self.waits, self.ready, self.asked = waits, True, list[int]()

    def take_turn(self, seconds: float | None = None, calls: int = 0) -> list[float]:
        if seconds is not None:
            calls = max(1, round(seconds / self.waits))
            time.sleep(paired_trial.PAUSE_S + calls * self.waits)
        else:
            self.asked.append(calls)
        return [1e-4] * calls

    def end_turns(self) -> None:
        self.ready = False


def test_a_turn_has_the_calls_that_fit_into_it_with_what_goes_on_between_them() -> None:
    quick, slow = Waiting(1e-3), Waiting(1e-3)
    paired_trial.take_turns([quick, slow])  # type: ignore[list-item]
    assert quick.asked == slow.asked
    assert 10 <= quick.asked[0] <= paired_trial.TURN_S / 1e-3 < paired_trial.TURN_S / 1e-4 / 5
    assert paired_trial.FEWEST_TURNS <= len(quick.asked) <= paired_trial.MOST_TURNS
    alone = Waiting(1e-4)
    paired_trial.take_turns([alone])  # type: ignore[list-item]
    assert alone.asked[0] > 150


@pytest.mark.parametrize(
    ("code", "kills", "said"),
    [
        (None, 0, "ended"),
        (3, 1, "ended with exit code 3"),
        (-9, 0, "ended by SIGKILL"),
        (-9, 1, "ended by SIGKILL, for the host was out of memory"),
        (-11, 1, "ended by SIGSEGV"),
        (-40, 0, "ended by signal 40"),
    ],
)
def test_how_a_process_ended_is_said(monkeypatch: pytest.MonkeyPatch, code: int | None, kills: int, said: str) -> None:
    monkeypatch.setattr(paired_trial, "oom_kills", lambda: 5 + kills)
    assert paired_trial.how_ended(code, 5) == said
