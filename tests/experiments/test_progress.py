"""What a run says of a busy machine while it goes on."""

import dataclasses

import pytest

from te_bench.experiments.progress import Progress
from te_bench.experiments.spec import Record, Trial

TRIAL = Trial(workload="train_step", device="cpu", problem={"model": "tiny"}, attention="flash")
BUSY = {"host_cores": 2, "cpu_others": 1.6, "cpu_idle": 0.01, "cpu_stolen": 0.0, "load_average": 5.0}
DONE = Record(trial=TRIAL, environment="e", outcome="ok", started_at="2026-11-23T12:00:00+00:00", wall_s=2.0)
WARNING = (
    "warning: the machine is busy: other programs took 1.6 of 2 cores (load 5.0) during PyTorch eager bf16. "
    "Timings will be noisy."
)


@pytest.mark.parametrize(("slots", "warnings"), [(1, [WARNING]), (2, [])])
def test_a_busy_machine_is_warned_of_once(capsys: pytest.CaptureFixture[str], slots: int, warnings: list[str]) -> None:
    """Not where trials run side by side, which are each other's others."""
    with Progress(3, 0, slots, lambda trial: "PyTorch eager bf16", lambda record: "2.50 ms") as progress:
        for state in ({}, BUSY, BUSY):
            progress(dataclasses.replace(DONE, device_state=state), None)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("warning")] == warnings
    assert [line for line in said if line.startswith("[")] == [
        f"[{n}/3] PyTorch eager bf16: 2.50 ms (2.0 s{left})"
        for n, left in ((1, f", 0:0{4 // slots} left"), (2, f", 0:0{2 // slots} left"), (3, ""))
    ]
