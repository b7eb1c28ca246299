"""The check of a user's model at a length whose scores or logits float64 cannot hold at once."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_bench.experiments.checks import attention_rows, large, training_step
from te_bench.experiments.checks.gradients import Gradients
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import train_step
from te_bench.models import adopted, sources

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
RECIPES: list[dict[str, Any]] = [{}, {"precision": "fp8", "recipe": "float8_current_scaling"}, {"attention": "math"}]


@pytest.fixture(autouse=True)
def own_kernel() -> Iterator[None]:
    yield
    adopted.pin(adopted.OWN)


def trial_of(folder: Path, batch: int = 1, **more: Any) -> Trial:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    source = sources.identify(str(folder))
    assert source is not None
    problem: dict[str, Any] = {
        "block": 16,
        "vocab": 64,
        "padded_vocab": 64,
        "batch": batch,
        "grad_clip": 0.0,
        **source.settings,
    }
    return Trial(workload="train_step", device="cpu", problem=problem, **{"attention": "own", **more})


def check(trial: Trial) -> dict[str, Any]:
    return training_step.begin(trial, *train_step.random_batches(trial)[0])[1]


@pytest.mark.parametrize("more", RECIPES)
def test_a_check_by_parts_is_the_check(more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(tmp_path, **more)
    whole = check(trial)
    heads: set[int] = set()
    usual = attention_rows.as_fused

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **said: Any) -> torch.Tensor:
        heads.add(k.shape[1])
        return usual(q, k, v, **said)

    monkeypatch.setattr(attention_rows, "as_fused", noted)
    monkeypatch.setattr(large, "LARGE", 2**8)  # 1,024 scores of a layer, 1,024 logits
    found = check(trial)
    assert found["reference"] == whole["reference"]
    errors = [{q["name"]: (q["error"], q["limit"]) for q in of["quantities"]} for of in (whole, found)]
    assert errors[0].keys() == errors[1].keys()
    for name, known in errors[0].items():
        assert errors[1][name] == pytest.approx(known, rel=0.1, abs=1e-4), name
    assert heads == (set() if more.get("attention") == "math" else {1})


def test_nothing_but_the_blocks_inputs_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(tmp_path)

    def kept() -> int:
        sizes: dict[int, int] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            if x.dtype is torch.float64:
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            check(trial)
        return sum(sizes.values())

    whole = kept()
    monkeypatch.setattr(large, "LARGE", 2**8)
    assert kept() < whole / 2


def test_what_does_not_fit_has_fewer_sequences_then_fewer_layers(tmp_path, monkeypatch):
    usual = Gradients.of_step
    tried: list[tuple[int, int]] = []

    def short_of_memory(step: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        tried.append((len(inputs), len(step.model.made.module.model.layers)))
        if tried[-1] != (1, 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return usual(step, inputs, targets)

    monkeypatch.setattr(Gradients, "of_step", short_of_memory)
    found = check(trial_of(tmp_path, batch=2))
    assert list(dict.fromkeys(tried)) == [(2, 5), (1, 5), (1, 1)]
    assert "both with 1 of the model's layers" in found["reference"]
    assert found["reference"].endswith("both of 1 of 2 sequences")
