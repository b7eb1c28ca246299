"""pytest-benchmark suites over the kernels: `make bench`, or `pytest benchmarks`. Rivals come from the registries.

Large shapes in bf16 on a GPU, small ones in fp32 on a CPU. `cuda_benchmark` times with CUDA events, the L2 flushed before
each call (te_bench.experiments.timing.kernel), and is the plain `benchmark` fixture on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from te_bench.experiments import environment, timing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Events:
    """The timer that pytest-benchmark is given on a GPU: its readings are what CUDA events have measured before."""

    __name__ = "torch.cuda.Event"  # what a saved benchmark says of its timer

    def __init__(self) -> None:
        self._readings: list[float] = []

    def replay(self, seconds: Sequence[float]) -> None:
        """Let each round begin at 0 and end at its time."""
        self._readings = [reading for duration in reversed(seconds) for reading in (duration, 0.0)]

    def __call__(self) -> float:
        return self._readings.pop()


EVENTS = Events()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), help="Default: cuda where there is a GPU.")


def device_of(config: pytest.Config) -> str:
    asked = config.getoption("--device")
    return str(asked) if asked else "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if device_of(config) == "cuda":
        for item in items:
            item.add_marker(pytest.mark.benchmark(timer=EVENTS))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    found = device_of(request.config)
    if found == "cuda" and not torch.cuda.is_available():
        pytest.skip("--device cuda: torch sees no NVIDIA GPU")
    return found


@pytest.fixture(scope="session")
def capability(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device == "cuda" else None


@pytest.fixture(scope="session")
def dtype(device: str) -> str:
    """ "bf16" on a GPU; "fp32" on a CPU, many of which have no bf16 arithmetic."""
    return "bf16" if device == "cuda" else "fp32"


@pytest.fixture(scope="session")
def machine(device: str) -> dict[str, Any]:
    """What a result depends on besides its benchmark: GPU, driver, torch and the like, as in a te-bench record."""
    found = environment.capture(device, environment.visible_gpus()[:1] if device == "cuda" else [])
    identity = found["identity"]
    assert isinstance(identity, dict)
    return identity


@pytest.fixture
def cuda_benchmark(benchmark: Any, device: str, machine: dict[str, Any]) -> Callable[..., None]:
    """cuda_benchmark(call, group=..., **shape): time `call`, and say of what shape and on what machine it was."""

    def run(call: Callable[[], object], *, group: str, **shape: object) -> None:
        benchmark.group = group
        benchmark.extra_info.update(machine, **shape)
        if device != "cuda" or not benchmark.enabled:
            benchmark(call)
            return
        seconds = timing.kernel(call, device)
        EVENTS.replay(seconds)
        benchmark.pedantic(lambda: None, rounds=len(seconds))

    return run


@pytest.fixture
def randn(device: str, dtype: str) -> Callable[..., torch.Tensor]:
    """Standard normal tensors, the same in every run."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *size: torch.randn(size, generator=generator, device=device).to(DTYPES[dtype])
