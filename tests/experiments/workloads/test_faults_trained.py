"""Every planted fault on a real training run, small as it is: worse than bf16 by far more than bf16 is from itself."""

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_bench.experiments import trial_model
from te_bench.experiments.checks import training_step, what_ran
from te_bench.experiments.instruments import profiling
from te_bench.experiments.measurement import Context, Diverged
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import training
from te_bench.training import corpus as corpora
from te_bench.training import data
from te_bench.training.evaluation import evaluate
from te_bench.training.step import train

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
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(the corpus, the folder that it is cached in)"""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(TEXT)
    return corpora.prepare(f"text:{folder / 'text.txt'}", "bytes", cache=folder), folder


def trial_of(corpus: Any, seed: int = 0, recipe: str | None = None, **problem: Any) -> Trial:
    return Trial(
        workload="training",
        device="cpu",
        problem={**PROBLEM, "corpus": corpus.key, **problem},
        attention="flash",
        precision="fp8" if recipe else "bf16",
        recipe=recipe,
        seed=seed,
    )


@pytest.fixture(scope="module")
def end(corpus: Any) -> Iterator[Any]:
    """end(seed, recipe, **problem) -> the final losses (by bf16, native) of a training; each is trained once."""
    made, folder = corpus
    known: dict[str, tuple[float, float]] = {}

    def trained(*asked: Any, **problem: Any) -> tuple[float, float]:
        trial = trial_of(made, *asked, **problem)
        if trial.id not in known:
            found = training.run(trial, Context(cache=folder)).samples
            known[trial.id] = found["val_loss"][-1], found["val_loss_native"][-1]
        return known[trial.id]

    with pytest.MonkeyPatch.context() as patch:  # what test_training.py has, and a fifth of the time goes to
        patch.setattr(training_step, "begin", lambda trial, *_: (trial_model.step_of(trial), {}))
        patch.setattr(profiling, "kernels_seen", lambda call, _: call())
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
        ("short_history", "delayed_scaling", 2.4),  # 2.42 to 2.44
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


def test_e5m2_in_the_forward_pass_shows_where_the_model_is_evaluated_as_it_trains(corpus: Any) -> None:
    """Two mantissa bits train nearly as three do, so the loss in bf16 hides them; what they cost by themselves does not.

    native - bf16 of the same weights, the mean of 15 evaluations: 12e-4 to 23e-4 with E5M2, 0.4e-4 to 8e-4 without, 6 seeds
    each. One evaluation varies by as much as it shows, a seed by a third: two of them differ by 3.6 errors.
    """
    made, _ = corpus

    def costs(seed: int, **fault: str) -> float:
        trial = trial_of(made, seed, CURRENT, steps=100, **fault)
        step, batches = trial_model.step_of(trial), trial_model.batches_of(trial, made)
        torch.manual_seed(seed)

        def loss(precision: str, quantized: bool) -> float:
            held_out = data.validation(made, **trial_model.sizes_of(trial), max_tokens=512, device="cpu")
            return evaluate(step.model, held_out, precision, quantized=quantized)

        done = train(step, batches, lambda number: number / 100 if number < 100 else None)
        looked = (number for number, _ in done if number >= 25 and (number + 1) % 5 == 0)
        return statistics.mean(loss("fp8", True) - loss("bf16", False) for _ in looked)

    assert sum(costs(seed, fault="e5m2_forward") for seed in range(2)) > sum(costs(seed) for seed in range(2))
