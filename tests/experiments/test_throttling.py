"""What is seen of a GPU's clocks around timed blocks, through a management library that the test plays."""

from typing import Any

import pynvml
import pytest

from te_bench.experiments import environment
from te_bench.experiments import trial as child
from te_bench.experiments.measurement import Context, Measurement
from te_bench.experiments.spec import Trial
from te_bench.experiments.throttling import Watch


class Gpu:
    """NVML with one GPU, "GPU-1", at the clock (MHz) and with the reasons that the test sets; None: it does not say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.mhz: int | None = 1980
        self.reasons: int | None = 0x1
        for name in ("ClockInfo", "CurrentClocksEventReasons", "HandleByUUID", "Temperature", "PowerUsage"):
            monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", getattr(self, name))
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)

    def HandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def ClockInfo(self, handle: str, kind: int) -> int:
        return self.said(self.mhz) if kind == 1 else 3201

    def CurrentClocksEventReasons(self, handle: str) -> int:
        return self.said(self.reasons)

    def Temperature(self, handle: str, kind: int) -> int:
        return 50

    def PowerUsage(self, handle: str) -> int:
        return 500_000

    def said(self, value: int | None) -> int:
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def watched(gpu: Gpu, *looks: tuple[int | None, int | None], end: tuple[int | None, int | None]) -> dict[str, Any]:
    watch = Watch(lambda: "GPU-1")
    for gpu.mhz, gpu.reasons in looks:
        watch.look()
    gpu.mhz, gpu.reasons = end
    return watch.state()


def test_reasons_are_the_union_and_the_clock_is_the_lowest_whatever_the_end_is_like(gpu: Gpu) -> None:
    found = watched(gpu, (1980, 0x4), (1500, 0x40 | 0x1), (1700, 0x4), end=(345, 0x20))
    assert found["throttle_reasons"] == 0x4 | 0x40 | 0x1 | 0x20
    assert found["lowest_sm_clock_hz"] == 1.5e9  # around the timed blocks: an idle GPU at the end says nothing of them
    assert found["sm_clock_hz"] == 345e6
    assert (found["uuid"], found["temperature_c"], found["power_w"]) == ("GPU-1", 50, 500.0)


def test_without_a_look_it_is_the_state_at_the_end(gpu: Gpu) -> None:
    assert watched(gpu, end=(1980, 0x8)) == environment.gpu_state("GPU-1")
    assert watched(gpu, end=(1980, 0x8))["throttle_reasons"] == 0x8


def test_what_the_gpu_does_not_say_is_null_and_not_0(gpu: Gpu) -> None:
    found = watched(gpu, (None, None), end=(None, None))
    assert (found["throttle_reasons"], found["lowest_sm_clock_hz"]) == (None, None)
    found = watched(gpu, (None, None), (1500, 0x8), end=(1980, None))
    assert (found["throttle_reasons"], found["lowest_sm_clock_hz"]) == (0x8, 1.5e9)


def test_a_process_without_a_gpu_sees_nothing(gpu: Gpu) -> None:
    named: list[str] = []
    watch = Watch(lambda: named[-1] if named else None)
    watch.look()
    assert (watch.seen, watch.state()) == ([], {})
    named.append("GPU-1")  # the workload touched CUDA only now
    gpu.reasons = 0x40
    watch.look()
    gpu.reasons = 0
    assert watch.state()["throttle_reasons"] == 0x40
    other = Watch(lambda: "GPU-2")
    other.look()
    assert other.state() == {}


def test_a_trial_s_record_has_what_was_seen_while_it_was_timed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(trial: Trial, context: Context) -> Measurement:
        gpu.reasons = 0x80
        child.timing._LOOK.get()()  # what a timed block does on a GPU
        gpu.reasons = 0
        return Measurement()

    monkeypatch.setattr(child.plugins, "load", lambda *_: run)
    monkeypatch.setattr(child, "_gpu", lambda: "GPU-1")
    state = child.run(Trial(workload="training", device="cuda", problem={}, attention="manual"), Context())[
        "device_state"
    ]
    assert state["throttle_reasons"] == 0x80
    assert state["lowest_sm_clock_hz"] == 1.98e9
