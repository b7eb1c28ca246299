"""What te-bench reads of its control group."""

import os
from pathlib import Path
from typing import Any

import pytest

from te_bench.experiments import environment, host


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, 1e9),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1e9),
        ({"cpu.max": "nonsense\n"}, 1e9),
        ({}, 1e9),
    ],
)
def test_a_quota_is_worth_so_many_cores(files: dict[str, str], cores: float, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert host.quota(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (2.9, 2), (64.0, 3), (1e9, 3)])
def test_cores_are_at_most_the_quotas(quota: float, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "quota", lambda: quota)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    assert host.cores() == cores
    assert environment.capture("cpu", [])["identity"]["cores"] == cores


class Proc:
    """A /proc of two cores that the test moves on, in seconds: this session's time, that of others, idle, stolen."""

    def __init__(self, root: Path):
        self.root, self.spent = root, dict.fromkeys(("own", "others", "idle", "stolen"), 0.0)
        self.pass_time()

    def pass_time(self, **seconds: float) -> None:
        ticks = os.sysconf("SC_CLK_TCK")
        self.spent |= {name: self.spent[name] + value for name, value in seconds.items()}
        own, others, idle, stolen = (round(value * ticks) for value in self.spent.values())
        self.root.mkdir(exist_ok=True)
        (self.root / "stat").write_text(f"cpu {own + others} 0 0 {idle} 0 0 0 {stolen} 0 0\ncpu0 1 2 3\n")
        for pid, session, used in ((10, os.getsid(0), own), (11, os.getsid(0) + 1, others)):
            (self.root / str(pid)).mkdir(exist_ok=True)
            line = f"{pid} (a (b) c) S 1 {pid} {session} 0 -1 0 0 0 0 0 {used} 0 0 0 20 0"
            (self.root / str(pid) / "stat").write_text(line)


def load(tmp_path: Path, **seconds: float) -> dict[str, Any]:
    proc = Proc(tmp_path / "proc")
    proc.pass_time(own=500.0, others=900.0, idle=1e4)  # before
    before = host.cpu_time(proc.root)
    proc.pass_time(**seconds)
    return host.load_since(before, proc.root)


def test_whose_the_cpu_time_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(host.os, "getloadavg", lambda: (5.04, 1.0, 1.0), raising=False)
    found = load(tmp_path, own=3.0, others=15.0, idle=1.0, stolen=1.0)
    expected = {"load_average": 5.04, "host_cores": 2, "cpu_others": 1.5, "cpu_idle": 0.05, "cpu_stolen": 0.05}
    assert found == pytest.approx(expected)
    said = "other programs took 1.5 of 2 cores (load 5.0) and its host took 5 % of the CPU time away"
    assert host.disturbance(found) == said


@pytest.mark.parametrize(
    "seconds",  # all of it its own; beside it, on cores that it has no use for; hardly any
    [{"own": 20}, {"own": 2, "others": 8, "idle": 10}, {"own": 19, "others": 1}, {"own": 19.9, "stolen": 0.1}],
)
def test_nobody_disturbed(seconds: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "cpu_count", lambda: 2)
    assert host.disturbance(load(tmp_path, **seconds)) is None


def test_what_is_not_said_is_left_out(tmp_path: Path) -> None:
    assert host.cpu_time(tmp_path) is None
    assert set(host.load_since(None, tmp_path)) == {"host_cores", "load_average"}
    assert host.disturbance({}) is None
    (tmp_path / "stat").write_text("nonsense\n")
    assert host.cpu_time(tmp_path) is None


@pytest.mark.skipif(not host.PROC.joinpath("stat").exists(), reason="needs /proc")
def test_this_session_s_time_is_its_own() -> None:
    before = host.cpu_time()
    while sum(os.times()[:2]) < 0.2:  # this process has taken that much already, or takes it here
        pass
    after = host.cpu_time()
    assert after.own >= 0.19
    assert before.total <= after.total
