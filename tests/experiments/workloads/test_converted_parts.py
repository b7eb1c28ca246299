"""A user's model whose parts te.convert replaces is a training step like any other: checked against itself in float64."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from te_bench.experiments.measurement import CheckFailed, Context, Unsupported
from te_bench.experiments.spec import OWN_ATTENTION, Trial
from te_bench.experiments.workloads import train_step, training
from te_bench.models import conversion
from te_bench.models.huggingface import head
from te_bench.models.sources import identify

pytestmark = pytest.mark.usefixtures("plain_heads")

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def problem(tmp_path: Path, brief: None) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    source = identify(str(tmp_path))
    settings: dict[str, Any] = {"batch": 2, "block": 32, "vocab": 128, "padded_vocab": 128, "data": "random"}
    return {**settings, **source.settings, "grad_clip": 0.0}


@pytest.mark.parametrize("parts", [None, "all"])
def test_a_training_that_ends_in_bf16_knows_what_runs_there(problem: dict[str, Any], parts: str | None) -> None:
    whole = {"steps": 3, "bf16_from": 2, "eval_every": 3, "eval_tokens": 64, "evaluate": "both", "learning_rate": 1e-3}
    own = {**problem, **whole, **({"parts": parts} if parts else {})}
    asked = {"attention": OWN_ATTENTION, "precision": "fp8", "recipe": "delayed_scaling"}
    found = training.run(Trial(workload="training", device="cpu", problem=own, **asked, mode="eager"), Context())
    assert found.samples["step"] == [0, 1, 2]
    ended = found.work["ended"]["ran"]
    assert (ended["gemm_fp8"], bool(ended["fused_blocks"])) == (0, parts is not None)


def run(problem: dict[str, Any], recipe: str | None, device: str = "cpu", mode: str = "eager") -> Any:
    precision = "fp8" if recipe else "bf16"
    trial = Trial(
        workload="train_step",
        device=device,
        problem=problem,
        attention=OWN_ATTENTION,
        precision=precision,
        recipe=recipe,
        mode=mode,
    )
    return train_step.run(trial, Context())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", [None, "delayed_scaling", "float8_current_scaling"])
def test_all_parts_are_checked(problem: dict[str, Any], recipe: str | None, device: str) -> None:
    found = run({**problem, "parts": "all"}, recipe, device)
    assert found.check["quantities"]
    assert found.samples["latency_s"]


def test_compiled_blocks_go_layer_by_layer_and_pass(problem: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their eager pass, which the check looks at, goes by the fused chain, and a compiled one does not."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    found = run({**problem, "parts": "all"}, None, mode="compile")
    torch._dynamo.reset()
    assert found.work["ran"]["fused_blocks"] == 0
    assert found.samples["latency_s"]


def test_a_part_that_computes_something_else_fails(problem: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = conversion.convert

    def wrong(model: Any, *arguments: Any, **named: Any) -> Any:
        done = right(model, *arguments, **named)
        if named.get("parts"):
            model.model.norm.eps = 1.0
        return done

    monkeypatch.setattr(conversion, "convert", wrong)
    with pytest.raises(CheckFailed, match="error"):
        run({**problem, "parts": "all"}, None)


HEAD_IN_BF16 = {"parts": "all", "head": "chunked"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_bf16_is_checked_and_seen(problem: dict[str, Any], device: str, tied: bool) -> None:
    config = {**json.loads(problem["config"]), "tie_word_embeddings": tied}
    found = run({**problem, "config": json.dumps(config), **HEAD_IN_BF16}, "delayed_scaling_e4m3", device)
    assert found.work["ran"]["head_chunked"] > 0
    assert (found.work["ran"]["head_fp8"], found.work["ran"]["gemm_fp8"] > 0) == (0, True)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed_scaling", "delayed_scaling_e4m3"])
def test_a_captured_step_with_a_head_in_bf16_is_checked(problem: dict[str, Any], recipe: str) -> None:
    found = run({**problem, **HEAD_IN_BF16, "optimizer": "triton"}, recipe, "cuda", "cudagraph")
    assert (found.work["ran"]["head_fp8"], found.work["ran"]["head_chunked"] > 0) == (0, True)


def test_a_head_in_fp8_where_bf16_was_asked_for_fails(problem: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = head.convert
    monkeypatch.setattr(head, "convert", lambda model, undo, in_fp8: right(model, undo, True))
    with pytest.raises(CheckFailed, match=r"head chunked: 1 or more expected, 0 ran; head fp8: 0 expected, [1-9]"):
        run({**problem, **HEAD_IN_BF16}, "delayed_scaling_e4m3")


@pytest.mark.parametrize("asked", [{"head": "chunked"}, {"head": "fp8", "parts": "all"}])
def test_other_heads_of_a_users_model_are_refused(problem: dict[str, Any], asked: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="a user's model takes chunked, with te-bench's parts"):
        run({**problem, **asked}, "delayed_scaling_e4m3")
