"""Rivals of a user's model, by stand-ins of their packages: what they change, what they refuse, and the lines that do it."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import MODULE
from torch import nn

from te_bench.experiments import trial_model
from te_bench.experiments.checks import adopted_step, what_ran
from te_bench.experiments.measurement import Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.suite_trials import BENCH_PY
from te_bench.models import rivals, sources
from te_bench.models.peers import torchao as peer
from te_bench.models.rivals import Adoption, liger
from te_bench.models.sources import Source

TORCHAO = ("torchao_tensorwise", "torchao_rowwise")


class Model(nn.Module):
    """A head, one tied to the embedding, an odd size, a Linear under two names and one that is read and not called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.positions = nn.Embedding(64, 32)
        self.first, self.wide = nn.Linear(32, 64), nn.Linear(64, 32)
        self.again = self.first
        self.odd = nn.Linear(32, 24)
        self.attention = nn.MultiheadAttention(32, 2)
        self.head, self.tied = nn.Linear(32, 96), nn.Linear(32, 64)
        self.tied.weight = self.positions.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.wide(self.first(self.embedding(x))))
        return y


def adoption(name: str) -> Adoption:
    found = rivals.load(name).adoption
    assert found is not None
    return found


def converted(model: nn.Module) -> set[str]:
    return {n for n, m in model.named_modules(remove_duplicate=False) if type(m).__name__ == "Converted"}


@pytest.mark.parametrize("name", TORCHAO)
def test_torchao_takes_the_linears_that_are_called_and_whose_sizes_fit(name: str, torchao: list[str]) -> None:
    model = Model()
    before = dict(model.named_parameters())
    changed = adoption(name).build(model)
    assert changed.linears == ("first", "wide")
    assert converted(model) == {"first", "again", "wide"}
    assert all(parameter is before[n] for n, parameter in model.named_parameters())
    assert torchao == [name.removeprefix("torchao_")]


@pytest.mark.parametrize("name", TORCHAO)
def test_its_lines_do_the_same_to_a_model(name: str, torchao: list[str]) -> None:
    model = nn.Sequential(nn.Embedding(96, 32), nn.Linear(32, 64), nn.Linear(64, 40), nn.Linear(40, 96))
    exec("\n".join(adoption(name).code(96)), {"model": model})
    assert converted(model) == {"1"} == set(peer.linears(model))


def test_torchao_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = adoption("torchao_rowwise").unsupported
    monkeypatch.setattr(peer, "missing", lambda *_: None)
    assert unsupported(Model(), "cuda", (9, 0)) is None
    assert "compute capability 8.9" in str(unsupported(Model(), "cuda", (8, 6)))
    none = "the model has no nn.Linear beside its head whose features are multiples of 16"
    assert unsupported(nn.Sequential(nn.Embedding(96, 32), nn.Linear(32, 96)), "cuda", (9, 0)) == none


def home(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module as transformers' of a family, whose class looks a function up when it is called."""
    module: Any = types.ModuleType("modeling_llama_alike")
    source = (
        "from torch import nn\n\n\ndef rotate(x):\n    return 'plain'\n\n\n"
        "class LlamaForCausalLM(nn.Module):\n    def forward(self, x):\n        return rotate(x)\n"
    )
    exec(source, module.__dict__)
    module.LlamaForCausalLM.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def a_llama(module: Any, kind: str = "llama") -> Any:
    model = module.LlamaForCausalLM()
    model.config = types.SimpleNamespace(model_type=kind)
    return model


def stand_in_of_liger(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    def apply(model: nn.Module) -> None:
        module.rotate = lambda x: "Liger's"
        model.patched = True  # type: ignore[assignment]

    patch: Any = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patch._apply_liger_kernel_to_instance = apply
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, patch.__name__, patch)


def test_what_liger_replaces_holds_for_its_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = home(monkeypatch)
    stand_in_of_liger(monkeypatch, module)
    theirs, plain = a_llama(module), a_llama(module)
    changed = adoption("liger").build(theirs)
    assert theirs.patched
    assert changed.linears == ()
    with changed.around():
        assert theirs(1) == "Liger's"
    assert plain(1) == "plain"
    with pytest.raises(RuntimeError), changed.around():
        raise RuntimeError
    assert plain(1) == "plain"


def test_the_lines_of_liger_patch_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    module = home(monkeypatch)
    stand_in_of_liger(monkeypatch, module)
    model = a_llama(module)
    exec("\n".join(adoption("liger").code(96)), {"model": model})
    assert model.patched


def test_liger_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    module = home(monkeypatch)
    unsupported = adoption("liger").unsupported
    with monkeypatch.context() as there:
        there.setattr(liger, "missing", lambda *_: None)
        assert unsupported(a_llama(module), "cuda", (9, 0)) is None
        assert unsupported(a_llama(module), "cpu", None) == "needs an NVIDIA GPU"
        other = "it patches causal models of transformers (gemma, gemma2, granite, llama, "
        assert str(unsupported(Model(), "cuda", (9, 0))).startswith(other)
        assert str(unsupported(a_llama(module, "gpt2"), "cuda", (9, 0))).endswith("and this is a LlamaForCausalLM")
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    assert unsupported(a_llama(module), "cuda", (9, 0)) == "needs liger-kernel: pip install liger-kernel"


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    (tmp_path / "adopted_by_rivals.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = sources.identify("adopted_by_rivals:make", ["layers=2", "width=48"])
    assert source is not None
    return source


def a_trial(source: Source, block: int) -> Trial:
    problem = {**BENCH_PY, **source.settings, "batch": 2, "block": block, "vocab": 64, "padded_vocab": 64}
    rival = rivals.load("torchao_tensorwise")
    return Trial(
        workload="train_step",
        device="cpu",
        problem={**problem, "data": "random", "rival": "torchao_tensorwise"},
        attention="own",
        precision=rival.precision,
        recipe=rival.recipe,
    )


def test_a_trial_is_held_to_three_fp8_gemms_for_each_converted_linear(own_model: Source, torchao: list[str]) -> None:
    trial = a_trial(own_model, 16)
    model = trial_model.adopted_of(trial)
    assert model.recipe is None
    assert len(model.converted) == 4 * 2
    with model.counted():
        model(*trial_model.batches_of(trial)(0))
    assert what_ran.expected_of_step(trial, 32, model)["gemm_fp8"] == (3 * 4 * 2, None)


def test_rows_that_its_gemms_do_not_take_are_refused(own_model: Source, torchao: list[str]) -> None:
    trial = a_trial(own_model, 9)
    said = "rival torchao_tensorwise: a Linear gets 18 rows, no multiple of 16; choose another --batch"
    with pytest.raises(Unsupported, match=said):
        adopted_step.begin(trial, *trial_model.batches_of(trial)(0))


def test_a_machine_without_the_package_says_so(own_model: Source) -> None:
    with pytest.raises(Unsupported, match="rival torchao_tensorwise: needs torchao: pip install torchao=="):
        trial_model.require_supported(a_trial(own_model, 16))
    others = dataclasses.replace(
        a_trial(own_model, 16), problem={**a_trial(own_model, 16).problem, "rival": "transformer_engine_current"}
    )
    with pytest.raises(Unsupported, match="rival transformer_engine_current: it trains only te-bench's own models"):
        trial_model.require_supported(others)
