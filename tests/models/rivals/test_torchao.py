"""torchao's Linears, by a stand-in of torchao: what is converted, by which recipe, and where it cannot run."""

import dataclasses

import pytest
from torch import nn

from te_bench.experiments import trial_model
from te_bench.experiments.measurement import Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.suite_trials import BENCH_PY
from te_bench.models import recipe as recipes
from te_bench.models import rivals

PROBLEM = {**BENCH_PY, "batch": 2, "block": 16, "vocab": 250, "padded_vocab": 256, "data": "random"}
NAMES = {"torchao_tensorwise": "tensorwise", "torchao_rowwise": "rowwise"}
MODELS = ["tiny", "llama-tiny"]


def a_trial(name: str, model: str = "tiny", key: str = "rival") -> Trial:
    problem = {**PROBLEM, "model": model, key: name}
    how = {"attention": "flash", "precision": "fp8", "recipe": rivals.load(name).recipe}
    return Trial(workload="train_step", device="cpu", problem=problem, **how)


@pytest.mark.parametrize("key", ["rival", "linears"])  # the latter in what was published before there were others
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_every_linear_but_the_head_is_theirs_and_no_recipe_of_ours_runs(name, model, key, torchao):
    built = trial_model.build(a_trial(name, model, key))
    kinds = {path: type(module) for path, module in built.named_modules() if isinstance(module, nn.Linear)}
    assert kinds.pop("lm_head") is nn.Linear
    assert len(kinds) == 4 * built.config.shape.layers
    assert {kind.__name__ for kind in kinds.values()} == {"Converted"}
    assert torchao == [NAMES[name]]
    assert built.recipe is None


def test_the_weights_are_those_of_the_model_without_it(torchao: list[str]) -> None:
    trial = a_trial("torchao_rowwise", "llama-tiny")
    plain = dataclasses.replace(trial, problem={k: v for k, v in trial.problem.items() if k != "rival"}, recipe=None)
    theirs, ours = (dict(trial_model.build(t).named_parameters()) for t in (trial, plain))
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].equal(parameter) for name, parameter in ours.items())


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_is_one_of_ours(name: str) -> None:
    assert rivals.load(name).recipe in recipes.names()


def test_where_it_cannot_run_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    config = trial_model.config_of(a_trial("torchao_rowwise"))
    unsupported = rivals.load("torchao_rowwise").unsupported
    with monkeypatch.context() as there:
        there.setattr("importlib.util.find_spec", lambda package: object())
        assert unsupported(config, "cuda", (9, 0)) is None
        for device, capability in (("cuda", (8, 6)), ("cpu", None)):
            assert "compute capability 8.9" in str(unsupported(config, device, capability))
    with monkeypatch.context() as missing:
        missing.setattr("importlib.util.find_spec", lambda package: None)
        assert "pip install torchao==" in str(unsupported(config, "cuda", (9, 0)))
    with pytest.raises(Unsupported, match="rival torchao_rowwise: needs torchao: pip install torchao=="):
        trial_model.require_supported(a_trial("torchao_rowwise"))
