"""Every planted fault on a real training run, small as it is: worse than bf16 by far more than bf16 is from itself."""

import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from te_bench.experiments.checks import training_step, what_ran
from te_bench.experiments.instruments import profiling
from te_bench.experiments.measurement import Context, Diverged
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import training
from te_bench.training import corpus as corpora

pytestmark = pytest.mark.slow

CURRENT = "float8_current_scaling"
#: A text that is learnt almost by heart: its loss falls to 0.09 nats, where rounding is a large part of what is left.
TEXT = "To be, or not to be, that is the question. " * 400
PROBLEM = {
    "model": "tiny",
    "batch": 4,
    "block": 32,
    "vocab": 256,
    "padded_vocab": 256,
    "tokenizer": "bytes",
    "data": "text:text.txt",
    "learning_rate": 3e-3,
    "min_learning_rate": 0.0,
    "warmup": 10,
    "steps": 200,
    "eval_every": 200,
    "eval_tokens": 2048,
    "evaluate": "both",
}


@pytest.fixture(scope="module")
def end(looks: Any) -> Any:
    """end(seed, recipe, **problem) -> the final losses (by bf16, native) of a training."""
    return lambda *asked, **problem: looks(*asked, **problem)[-1]


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """looks(seed, recipe, **problem) -> losses (by bf16, native) at every evaluation of a training, each trained once."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(TEXT)
    corpus = corpora.prepare(f"text:{folder / 'text.txt'}", "bytes", cache=folder)
    known: dict[str, list[tuple[float, float]]] = {}

    def trained(seed: int = 0, recipe: str | None = None, **problem: Any) -> list[tuple[float, float]]:
        trial = Trial(
            workload="training",
            device="cpu",
            problem={**PROBLEM, "corpus": corpus.key, **problem},
            attention="flash",
            precision="fp8" if recipe else "bf16",
            recipe=recipe,
            seed=seed,
        )
        if trial.id not in known:
            found = training.run(trial, Context(cache=folder)).samples
            known[trial.id] = list(zip(found["val_loss"], found["val_loss_native"], strict=True))
        return known[trial.id]

    with pytest.MonkeyPatch.context() as patch:  # what test_training.py has, and a fifth of the time goes to
        patch.setattr(training_step, "check_step", lambda *_: {})
        patch.setattr(profiling, "kernels_seen", lambda *_: None)
        patch.setattr(what_ran, "require", lambda trial, seen, measurement, asked: measurement)
        yield trained


def test_bf16_is_close_to_itself_one_ulp_away_and_so_are_the_right_recipes(end: Any) -> None:
    """A/A on 3 seeds: -0.001, -0.005, +0.005; recipes at most 0.019 away."""
    control, aa = end()[0], end(perturb_ulp=1)[0]
    assert control != aa
    assert abs(control - aa) < 0.02
    for recipe in (CURRENT, "delayed_scaling"):
        assert abs(control - end(recipe=recipe)[0]) < 0.03


@pytest.mark.parametrize(
    ("fault", "recipe", "gap"),
    [
        ("doubled_scale", CURRENT, 0.08),  # 0.08 to 0.30 measured, 3 seeds: the least is ten times what A/A shows
        ("frozen_scale", "delayed_scaling", 0.3),  # 0.31 to 0.49
        ("flushed_gradients", CURRENT, 0.35),  # 0.36 to 0.40
        ("transposed_wgrad", CURRENT, 1.4),  # 1.46 to 1.64
        (
            "poisoned_token",
            CURRENT,
            2.4,
        ),  # 2.41 to 2.57; under rowwise_scaling, where rows share no scale, 0.01 to 0.03
    ],
)
def test_a_fault_is_far_worse_than_bf16(end: Any, fault: str, recipe: str, gap: float) -> None:
    """One seed tells: the bound is above twice the 0.02 that bf16 may be from itself."""
    assert end(recipe=recipe, fault=fault)[0] - end()[0] > 0.7 * gap


def test_a_nan_at_depth_ends_the_training_of_a_deep_model_and_none_of_a_shallow_one(end: Any) -> None:
    short = {"steps": 40, "eval_every": 40}
    fault = {"recipe": "delayed_scaling", "fault": "nan_at_depth", **short}
    with pytest.raises(Diverged, match="the loss is nan at step 1"):
        end(**fault)
    assert abs(end(**fault, layers=1)[0] - end(layers=1, **short)[0]) < 0.03


def test_e5m2_in_the_forward_pass_shows_where_the_model_is_evaluated_as_it_trains(looks: Any) -> None:
    """Two mantissa bits train nearly as three do, so the loss in bf16 hides them; what they cost by themselves does not.

    native - bf16 of the same weights, the mean of 15 evaluations: 12e-4 to 23e-4 with E5M2, 0.4e-4 to 8e-4 without, 6 seeds
    each. One evaluation varies by as much as it shows, a seed by a third: two of them differ by 3.6 errors.
    """
    often = {"steps": 100, "eval_every": 5, "eval_tokens": 512}
    right, wrong = (
        [statistics.mean(native - bf16 for bf16, native in looks(seed, CURRENT, **more)[5:]) for seed in range(2)]
        for more in (often, {**often, "fault": "e5m2_forward"})
    )
    assert sum(wrong) > sum(right)
