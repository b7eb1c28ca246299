"""What te-bench reads of its control group."""

from pathlib import Path

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
    assert host._quota(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (2.9, 2), (64.0, 3), (1e9, 3)])
def test_cores_are_at_most_the_quotas(quota: float, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_quota", lambda: quota)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    assert host.cores() == cores
    assert environment.capture("cpu", [])["identity"]["cores"] == cores
