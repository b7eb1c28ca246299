"""The peer's Linears, by a stand-in of torchao: what is converted, by which recipe, and where it cannot run."""

import pytest
from torch import nn

from te_bench.experiments import trial_model
from te_bench.experiments.measurement import Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.suite_trials import BENCH_PY
from te_bench.models import recipe as recipes
from te_bench.models import torchao_linears

PROBLEM = {**BENCH_PY, "model": "tiny", "batch": 2, "block": 16, "vocab": 250, "padded_vocab": 256, "data": "random"}


def a_trial(name: str) -> Trial:
    return Trial(
        workload="train_step",
        device="cpu",
        problem={**PROBLEM, "linears": name},
        attention="flash",
        precision="fp8",
        recipe=torchao_linears.NAMES[name][1],
    )


@pytest.mark.parametrize("name", torchao_linears.NAMES)
def test_every_linear_but_the_head_is_the_peers_and_no_recipe_of_ours_runs(name: str, torchao: list[str]) -> None:
    model = trial_model.build(a_trial(name))
    kinds = {path: type(module) for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert kinds.pop("lm_head") is nn.Linear
    assert len(kinds) == 4 * model.config.n_layer
    assert {kind.__name__ for kind in kinds.values()} == {"Converted"}
    assert torchao == [torchao_linears.NAMES[name][0]]
    assert model.recipe is None


@pytest.mark.parametrize("name", torchao_linears.NAMES)
def test_the_recipe_is_one_of_ours(name: str) -> None:
    assert torchao_linears.NAMES[name][1] in recipes.names()


def test_where_it_cannot_run_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as there:
        there.setattr("importlib.util.find_spec", lambda package: object())
        assert torchao_linears.unsupported("cuda", (9, 0)) is None
        for device, capability in (("cuda", (8, 6)), ("cpu", None)):
            assert "compute capability 8.9" in str(torchao_linears.unsupported(device, capability))
    with monkeypatch.context() as missing:
        missing.setattr("importlib.util.find_spec", lambda package: None)
        assert "pip install torchao==" in str(torchao_linears.unsupported("cuda", (9, 0)))
    with pytest.raises(Unsupported, match="linears torchao_rowwise: needs"):
        trial_model.require_supported(a_trial("torchao_rowwise"))
