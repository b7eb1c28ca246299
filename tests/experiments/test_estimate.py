"""What a trial takes on an H200, before any has run: by the FLOP of a step, the recipe and the mode."""

from typing import Any

import pytest

from te_bench.experiments import estimate, plan
from te_bench.experiments.adoption import Adoptee
from te_bench.experiments.spec import Options, Trial
from te_bench.models import sources


def trials(suite: str, **asked: Any) -> tuple[Trial, ...]:
    return plan.resolve(suite, Options(device="cuda", seeds=1, data=asked.pop("data", {}), **asked)).trials


def total(suite: str, **asked: Any) -> float:
    return sum(estimate.seconds(trial) or 0.0 for trial in trials(suite, **asked))


SUITES = ["attention", "fp8", "heads", "layer", "memory", "nanogpt", "pieces", "quick", "scaling", "speed", "stress"]


@pytest.mark.parametrize("suite", SUITES)
def test_every_trial_of_a_gpu_is_estimated(suite: str) -> None:
    data = {"data": {"": "random"}} if suite == "stress" else {}
    assert all(estimate.seconds(trial) for trial in trials(suite, **data))


def test_a_larger_model_takes_longer_about_as_many_times_as_its_flop() -> None:
    one, three, eight = (total("speed", model=f"llama3-{size}b") for size in (1, 3, 8))
    assert 2 < three / one < 2.6  # 2.6 times the FLOP of a step
    assert 4.5 < eight / one < 6.5


def test_a_training_takes_as_long_as_its_steps_its_branch_and_its_emulated_format() -> None:
    def taken(recipe: str | None, **asked: Any) -> float:
        found = trials("convergence", preset="gpt2", data={"": "random"}, recipes=recipe and (recipe,), **asked)
        return estimate.seconds(next(t for t in found if t.problem["arm"] == ("recipe" if recipe else "control")))

    fp8 = taken("delayed_scaling")
    assert fp8 == taken(None) == pytest.approx(190, rel=0.01)
    for recipe, times in (("mxfp8_block_scaling", 1.23), ("nvfp4_block_scaling", 1.63)):
        assert taken(recipe) - 25 == pytest.approx(times * (fp8 - 25), rel=0.01)
    assert taken("delayed_scaling", branch_at=1200) - 25 == pytest.approx(835 / 2035 * (fp8 - 25))
    assert taken(None, branch_at=1200) == fp8  # with the trunk
    shared = trials("convergence", preset="gpt2", data={"": "random"}, share=2)
    assert {estimate.seconds(trial) for trial in shared} == {None}


def test_a_users_model_is_estimated_by_its_parameters_and_no_other_unknown_one() -> None:
    gpt2 = next(trial for trial in trials("speed") if trial.mode == "cudagraph")
    facts = sources.Facts(
        vocab=50257, block=None, sequence=None, parameters=10**9, sdpa=2, scores=4096, tried=32, text=True, manual=False
    )
    own = Adoptee(source=sources.Source(model="mine:make"), facts=facts)
    mine = gpt2.with_(model="mine:make")
    assert estimate.seconds(mine) is None
    assert 3 < (estimate.seconds(mine, own) or 0.0) / (estimate.seconds(gpt2) or 1.0) < 8  # of 8 times the parameters
