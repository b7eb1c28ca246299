"""Loss curves: by steps, by seconds, and where training falls apart."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from te_bench.experiments.measurement import Context, Diverged
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import training
from te_bench.models import corpus as corpora

TINY = {"model": "tiny", "batch": 4, "block": 8, "vocab": 256, "padded_vocab": 256, "tokenizer": "bytes"}
TINY |= {"learning_rate": 3e-3, "min_learning_rate": 3e-4, "eval_tokens": 64}


@pytest.fixture
def trial(tmp_path: Path) -> Any:
    """trial(steps=20) on a text that is easy to learn."""
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 200)
    corpus = corpora.prepare(f"text:{text}", "bytes", cache=tmp_path / "cache")

    def with_problem(**problem: Any) -> Trial:
        problem = {**TINY, "data": "text:text.txt", "corpus": corpus.key, **problem}
        return Trial(workload="training", device="cpu", problem=problem, attention="flash", precision="fp32")

    return with_problem


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(cache=tmp_path / "cache")


def test_a_curve_by_steps_has_every_step_and_the_validation_it_was_asked_for(trial: Any, context: Context) -> None:
    found = training.run(trial(steps=35, eval_every=10), context)
    assert found.samples["step"] == list(range(35))
    assert found.samples["val_step"] == [10, 20, 30, 35]
    assert len(found.samples["loss"]) == len(found.samples["time_s"]) == 35
    assert found.samples["loss"][-1] < found.samples["loss"][0]
    assert found.samples["val_loss"][-1] < found.samples["val_loss"][0]
    assert found.samples["time_s"] == sorted(found.samples["time_s"])
    assert found.samples["val_time_s"] == sorted(found.samples["val_time_s"])
    assert (found.work["batch"], found.work["tokens"], found.work["windows"]) == (4, 32, 8)


def test_evaluating_more_often_changes_nothing_in_the_training(trial: Any, context: Context) -> None:
    often, seldom = (training.run(trial(steps=30, eval_every=every), context).samples for every in (10, 30))
    assert often["loss"] == seldom["loss"]
    assert often["val_loss"][-1] == seldom["val_loss"][-1]


def test_a_time_budget_ends_training_and_is_measured_in_training_time(trial: Any, context: Context) -> None:
    found = training.run(trial(budget_s=0.5, eval_every_s=0.2), context).samples
    assert found["time_s"][-2] < 0.5 <= found["time_s"][-1]  # it ends with the step in which the budget does
    assert found["val_step"][-1] == found["step"][-1] + 1
    assert len(found["val_step"]) >= 2


def test_a_loss_that_is_not_finite_ends_training_and_keeps_what_was_before(trial: Any, context: Context) -> None:
    wild = trial(steps=50, eval_every=50, learning_rate=1e30, min_learning_rate=1e30, grad_clip=0.0)
    with pytest.raises(Diverged, match=r"the loss is (nan|inf) at step [1-9]") as caught:
        training.run(wild, context)
    kept = caught.value.measurement.samples
    assert kept["step"][0] == 0
    assert len(kept["loss"]) < 10
    assert all(map(math.isfinite, kept["loss"]))


def test_a_validation_loss_that_is_not_finite_is_diverged_too(
    trial: Any, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "evaluate", lambda model, batches, precision: math.nan)
    for every in (10, 100):  # while training, and at its end
        with pytest.raises(Diverged, match="the validation loss is nan after step ") as caught:
            training.run(trial(steps=20, eval_every=every), context)
        assert caught.value.measurement.samples["val_loss"] == []
        assert len(caught.value.measurement.samples["loss"]) == min(every, 20)


def test_a_corpus_that_is_not_in_the_cache_is_named(trial: Any, context: Context) -> None:
    lost = trial(steps=1)
    lost = dataclasses.replace(lost, problem={**lost.problem, "corpus": "0123456789abcdef"})
    with pytest.raises(ValueError, match="0123456789abcdef"):
        training.run(lost, context)
