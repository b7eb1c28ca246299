"""A Linear of the workload `linear`: checked, then timed, and no wrong one passes."""

from collections.abc import Callable

import pytest
import torch
from planting import once
from torch import Tensor

from te_bench.experiments import timing
from te_bench.experiments.measurement import CheckFailed, Context, Measurement, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import linear as workload

SIZES = {"tokens": 96, "in_features": 64, "out_features": 48}
RECIPES = ["delayed_scaling", "float8_current_scaling", "rowwise_scaling", "float8_block_scaling"]


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "kernel", once)


def run(recipe: str | None, device: str = "cpu", **sizes: int) -> Measurement:
    of = {"precision": "fp8" if recipe else "bf16", "recipe": recipe, "protocol": "kernel"}
    trial = Trial(workload="linear", device=device, problem=sizes or SIZES, attention="none", **of)
    return workload.run(trial, Context())


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_is_checked_and_timed(recipe: str | None) -> None:
    found = run(recipe)
    assert [len(seconds) for seconds in found.samples.values()] == [1]
    assert found.work["flop"] == 6 * 96 * 64 * 48
    assert found.work["ran"]["gemm_fp8" if recipe else "gemm_half"] == 3
    names = [q["name"] for q in found.check["quantities"]]
    assert {"y", "dx", "dW", "dW, scale", "dW, worst row"} <= set(names)
    assert all(q["error"] <= q["limit"] for q in found.check["quantities"])


def test_a_check_that_draws_random_numbers_is_the_same_whatever_ran_before() -> None:
    assert run("nvfp4_block_scaling").check == run("nvfp4_block_scaling").check


def test_of_many_features_fewer_rows_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    held, right = list[int](), torch.nn.Linear.forward

    def watched(layer: torch.nn.Linear, x: Tensor) -> Tensor:
        held.append(len(x))
        return right(layer, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", watched)  # the yardstick is one
    monkeypatch.setattr(workload, "CHECKED", 64 * 200)
    found = run(None, tokens=256, in_features=64, out_features=48)
    assert held == [128]
    assert found.work["flop"] == 6 * 256 * 64 * 48


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "sign": torch.neg,
    "double": lambda x: 2 * x,
    "5 % too large": lambda x: 1.05 * x,
    "not a number": lambda x: torch.where(torch.arange(x.numel()).view(x.shape) == 7, torch.nan, x),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("recipe", [None, "float8_current_scaling"])
def test_a_wrong_one_fails(recipe: str | None, which: int, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = workload._passes

    def spoilt(layer: torch.nn.Module, *arguments: object) -> tuple[Tensor, ...]:
        found = right(layer, *arguments)  # type: ignore[arg-type]
        ours = type(layer).__module__.startswith("te_bench")
        return tuple(WRONG[wrong](t) if ours and i == which else t for i, t in enumerate(found))

    monkeypatch.setattr(workload, "_passes", spoilt)
    with pytest.raises(CheckFailed, match="error"):
        run(recipe)


def test_bf16_in_place_of_fp8_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if autocast were forgotten."""
    monkeypatch.setattr(workload.te, "autocast", lambda recipe: torch.autograd.set_grad_enabled(True))
    with pytest.raises(CheckFailed, match="FP8"):
        run("float8_current_scaling")


def test_no_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("has one")
    with pytest.raises(Unsupported, match="no NVIDIA GPU"):
        run(None, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_on_a_gpu(recipe: str | None) -> None:
    found = run(recipe, "cuda", tokens=2048, in_features=1024, out_features=3072)
    assert found.work["kernel_s"]
