"""Inputs that are another seed's: three trials of one seed are no three."""

import dataclasses
from typing import Any

import pytest
import torch

from te_bench.experiments.checks import seeds
from te_bench.experiments.measurement import CheckFailed, Context
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import attention, layer, linear, linear_cross_entropy, piece

ATTENTION = {"batch": 2, "heads": 2, "length": 16, "head_dim": 8, "causal": True}
LAYER = {"layer": "te_layer", "variant": "fair", "hidden": 64, "ffn": 128, "heads": 4, "sequence": 32, "batch": 2}
LAYER |= {"dropout": 0.0, "mask": "causal"}
CASES: dict[Any, tuple[str, dict[str, Any]]] = {
    attention: ("flash", ATTENTION),
    layer: ("flash", LAYER),
    linear: ("none", {"tokens": 96, "in_features": 64, "out_features": 48}),
    linear_cross_entropy: ("none", {"n": 60, "d": 32, "vocab": 90, "padded": 96, "head": "chunked"}),
    piece: ("none", {"kind": "rmsnorm", "call": "backward", "backend": "torch", "m": 48, "n": 80}),
}


pytestmark = pytest.mark.usefixtures("brief")


def run(workload: Any) -> Any:
    kernel, problem = CASES[workload]
    name = workload.__name__.rpartition(".")[2]
    trial = Trial(workload=name, device="cpu", problem=problem, attention=kernel, precision="fp32", seed=3)
    return workload.run(trial, Context())


@pytest.mark.parametrize("workload", CASES, ids=lambda x: x.__name__.rpartition(".")[2])
def test_numbers_that_are_always_of_seed_0_fail(workload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfSeed0(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(0)

    assert run(workload).samples
    right = torch.manual_seed
    monkeypatch.setattr(torch, "Generator", OfSeed0)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: right(0))
    with pytest.raises(CheckFailed, match=r"^the (inputs|operands|inputs and weights) do not depend on the seed 3$"):
        run(workload)


@pytest.mark.parametrize("part", [0, slice(1, 3)], ids=["weights", "inputs"])
def test_a_layer_fails_if_part_of_what_it_draws_is_of_seed_0(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = layer.draw

    def wrong(p: Any, seed: int) -> tuple[Any, ...]:
        drawn, of_0 = (list(right(p, each)) for each in (seed, 0))
        drawn[part] = of_0[part]
        return tuple(drawn)

    monkeypatch.setattr(layer, "draw", wrong)
    with pytest.raises(CheckFailed, match=r"^the inputs and weights do not depend on the seed 3$"):
        run(layer)


def test_attention_fails_if_what_is_timed_alone_is_of_seed_0(monkeypatch: pytest.MonkeyPatch) -> None:
    right, drawn = attention.inputs, list[Trial]()

    def wrong(trial: Trial, *sizes: int) -> Any:
        drawn.append(trial)
        return right(dataclasses.replace(trial, seed=0) if len(drawn) == 2 else trial, *sizes)

    monkeypatch.setattr(attention, "inputs", wrong)
    with pytest.raises(CheckFailed, match=r"^the inputs are not those of the seed 3$"):
        run(attention)


@pytest.mark.parametrize("seed", range(20))
def test_few_integers_that_two_seeds_draw_alike_and_a_single_number_pass(seed: int) -> None:
    def few(of: int) -> list[torch.Tensor]:
        numbers = torch.Generator().manual_seed(of)
        return [torch.randint(3, (2,), generator=numbers), torch.randn(1, 1, generator=numbers)]

    seeds.require("inputs", seed, few, few(seed))
    seeds.require("inputs", seed, lambda of: few(of)[1:], few(seed)[1:])
