"""Typed problems: every published trial goes through its workload's and back to the same id; what is wrong is said."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from te_bench import plugins
from te_bench.experiments import plan, workloads
from te_bench.experiments.problems import (
    OPTIM,
    PROBLEMS,
    LayerProblem,
    StepProblem,
    TrainingProblem,
    TrainStepProblem,
    TrialProblem,
)
from te_bench.experiments.spec import Options, Trial
from te_bench.experiments.store import load, written
from te_bench.training.step import Optim

RESULTS = Path(__file__).resolve().parents[2] / "results"
JOURNALS = sorted(folder for folder in RESULTS.rglob("*") if folder.is_dir() and written(folder))
STEP: dict[str, Any] = {"model": "tiny", "batch": 2, "block": 64, "vocab": 250, "padded_vocab": 256}
TRIAL = Trial(workload="train_step", device="cpu", problem=STEP, attention="manual")


def there_and_back(trial: Trial) -> Trial:
    return dataclasses.replace(trial, problem=TrialProblem.of(trial).to_json())


def test_every_workload_has_its_problem() -> None:
    assert sorted(PROBLEMS) == plugins.names(workloads.__name__)


@pytest.mark.parametrize("folder", JOURNALS, ids=[str(folder.relative_to(RESULTS)) for folder in JOURNALS])
def test_published_trials_keep_their_ids(folder: Path) -> None:
    journal = load(folder)
    planned = [Trial.from_json({k: v for k, v in t.items() if k != "id"}) for p in journal.plans for t in p.trials]
    trials = {trial.id: trial for trial in [*planned, *(record.trial for record in journal.records.values())]}
    assert trials
    for name, trial in trials.items():
        assert there_and_back(trial).id == name
    assert {key for key, _ in journal.records} <= trials.keys()


@pytest.mark.parametrize("suite", plugins.names("te_bench.experiments.suites"))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_trials_of_suites_keep_theirs(suite: str, device: str, tmp_path: Path) -> None:
    trains = suite in ("convergence", "curves", "stress") or (suite, device) == ("quick", "cpu")
    options = Options(device=device, seeds=1, cache=tmp_path, data={"": "random"} if trains else {})
    for trial in plan.resolve(suite, options).trials:
        assert there_and_back(trial).to_json() == trial.to_json()


def test_a_setting_that_was_not_said_has_its_default_and_stays_out_of_the_json_but_one_that_was_stays_in() -> None:
    problem = TrainStepProblem.of(TRIAL)
    assert (problem.head, problem.data, problem.optim) == (None, "random", {})
    assert problem.to_json() == STEP
    assert dataclasses.replace(problem, head="fp8").to_json() == {**STEP, "head": "fp8"}
    said = {**STEP, "data": "random", "head": None}
    assert TrainStepProblem.of(dataclasses.replace(TRIAL, problem=said)).to_json() == said


def test_a_layer_s_other_settings_are_its_recipe_s() -> None:
    sizes = {"hidden": 32, "ffn": 64, "heads": 4, "sequence": 16, "batch": 2}
    said = {"layer": "plain", "variant": "fair", "dropout": 0.0, "mask": "full", **sizes, "amax_history_len": 16}
    problem = LayerProblem.of(dataclasses.replace(TRIAL, workload="layer", problem=said))
    assert problem.recipe_settings == {"amax_history_len": 16}
    assert problem.to_json() == said


def test_the_optimizer_s_settings_are_the_fields_of_its_dataclass() -> None:
    assert [field.name for field in dataclasses.fields(Optim)] == list(OPTIM)
    assert {field.name for field in dataclasses.fields(StepProblem)} > set(OPTIM)


@pytest.mark.parametrize(
    ("workload", "settings", "message"),
    [
        ("train_step", {"batch": None}, "train_step needs a whole number for 'batch', got None"),
        ("train_step", {"batch": 2.5}, "train_step needs a whole number for 'batch', got 2.5"),
        ("train_step", {"batch": True}, "train_step needs a whole number for 'batch', got True"),
        ("train_step", {"bach": 2}, "unknown setting of train_step 'bach'. Did you mean batch"),
        ("train_step", {"learning_rate": "1e-3"}, "train_step needs a number or null for 'learning_rate', got '1e-3'"),
        ("train_step", {"steps": 10}, "unknown setting of train_step 'steps'."),
        ("training", {}, "training needs a name for 'data', got None"),
        ("training", {"data": "random", "batch": "most"}, "training needs a whole number or 'max' for 'batch', got 'm"),
        ("max_batch", {"model": 7}, "max_batch needs a name for 'model', got 7"),
        ("ceilings", {}, "unknown setting of ceilings 'model'."),
    ],
)
def test_what_is_wrong_is_said(workload: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        TrialProblem.of(dataclasses.replace(TRIAL, workload=workload, problem={**STEP, **settings}))
    assert str(caught.value).startswith(message)


def test_null_is_a_value_where_it_says_everything() -> None:
    settings = {**STEP, "batch": "max", "data": "stdlib", "budget_s": 60.0, "memory_limit_gib": None}
    problem = TrainingProblem.of(dataclasses.replace(TRIAL, workload="training", problem=settings))
    assert problem.memory_limit_gib is None
    assert problem.to_json() == settings


def test_a_problem_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="train_step poses no problem of the kind LayerProblem"):
        LayerProblem.of(TRIAL)
