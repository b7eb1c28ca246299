"""Joules of a step: the counter's difference over so many steps as fill its window, of all GPUs or of none."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_bench.experiments import environment, exclusive
from te_bench.experiments.instruments import energy
from te_bench.experiments.measurement import CheckFailed
from te_bench.training.parallel import Parallel

JOULES, SECONDS = 8.0, 0.25


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was stepped; a GPU that takes 8 J for each."""
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(exclusive, "alone", contextlib.nullcontext)
    monkeypatch.setattr(environment, "energy", lambda uuid: 1e6 + JOULES * len(made) if uuid == "GPU-1" else None)
    return made


def test_energy_is_counted_over_the_whole_window(steps: list[int]) -> None:
    found = energy.sample(lambda: steps.append(1), "cuda", [0.1, SECONDS, 0.9])
    assert found == {"energy_j": [JOULES]}
    assert len(steps) == energy.WINDOW_S / SECONDS


class Two(Parallel):
    """A rank of two, the other of which takes `theirs`."""

    theirs: Any = 5.0

    def of_all(self, value: Any) -> list[Any]:
        return [value, SECONDS if value == SECONDS else self.theirs]


def test_all_gpus_of_a_step_count(steps: list[int]) -> None:
    parallel = Two()
    assert energy.sample(lambda: steps.append(1), "cuda", [SECONDS], parallel) == {"energy_j": [JOULES + 5.0]}
    parallel.theirs = None
    assert energy.sample(lambda: steps.append(1), "cuda", [SECONDS], parallel) == {}


@pytest.mark.parametrize(("watts", "passes"), [(700.0, True), (20.0, False)])
def test_more_energy_than_the_power_limit_allows_fails(watts: float, passes: bool, monkeypatch, steps) -> None:
    """8 J in a quarter of a second are 32 W."""
    monkeypatch.setattr(environment, "nvidia_gpus", lambda: [{"uuid": "GPU-1", "power_limit_w": watts}])
    monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=lambda: SECONDS * len(steps)))
    with contextlib.nullcontext() if passes else pytest.raises(CheckFailed, match="by its power limit"):
        assert energy.sample(lambda: steps.append(1), "cuda", [SECONDS]) == {"energy_j": [JOULES]}


def test_a_counter_that_stands_still_fails(steps: list[int]) -> None:
    with pytest.raises(CheckFailed, match="0 J in"):
        energy.sample(lambda: None, "cuda", [SECONDS])


def test_a_cpu_counts_none(steps: list[int]) -> None:
    assert energy.sample(lambda: steps.append(1), "cpu", [SECONDS]) == {}
    assert steps == []
