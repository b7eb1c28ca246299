"""The check of a user's step that is asked to compute its activations again."""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from te_bench.experiments import trial_model
from te_bench.experiments.adoption import adoptee
from te_bench.experiments.checks import adopted_step
from te_bench.experiments.measurement import CheckFailed, Context, Unsupported
from te_bench.experiments.spec import OWN_ATTENTION, Options, Trial
from te_bench.experiments.workloads import train_step
from te_bench.models.sources import Source
from te_bench.training.step import TrainStep

MODULE = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(64, 32), nn.ModuleList(Block() for _ in range(2))
        self.head, self.whole = nn.Linear(32, 64), whole

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.whole else x + block.down(F.gelu(block.up(x)))
        return self.head(x)


def whole():
    return Model(True)


def in_parts():
    return Model(False)


class Closed(Model):  # a branch that a gate of 0 closes: float64 and every rounding give its weights the gradient 0
    def __init__(self):
        super().__init__(True)
        self.branch = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    def forward(self, tokens):
        return super().forward(tokens) + 0 * self.head(self.branch(self.embedding(tokens)))


class Filled(Model):  # as XGLM, with a number of the dtype's in a tensor of no said dtype
    def __init__(self):
        super().__init__(True)

    def forward(self, tokens):
        x = super().forward(tokens)
        return torch.maximum(x, torch.full((), torch.finfo(x.dtype).min))


def bare():
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
"""


@pytest.fixture
def trial_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "checkpointed_blocks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda factory: Trial(
        workload="train_step",
        device="cpu",
        problem={
            **{"block": 8, "vocab": 64, "padded_vocab": 64, "batch": 2, "checkpointing": "blocks"},
            **Source(model=f"checkpointed_blocks:{factory}", sha256="0").settings,
        },
        attention="own",
    )
    sys.modules.pop("checkpointed_blocks", None)


def test_blocks_that_are_called_pass(trial_of: Any) -> None:
    trial = trial_of("whole")
    _, check = adopted_step.begin(trial, *train_step.random_batches(trial)[0])
    assert check["quantities"]


def test_gradients_of_nothing_are_no_rounding_that_is_too_small(trial_of: Any) -> None:
    trial = replace(trial_of("Closed"), precision="fp8", recipe="float8_current_scaling")
    assert train_step.run(trial, Context()).work["ran"]["gemm_fp8"]


def test_what_a_model_makes_without_a_dtype_goes_to_float64_with_it(trial_of: Any) -> None:
    assert train_step.run(trial_of("Filled"), Context()).samples["latency_s"]
    assert torch.get_default_dtype() is torch.float32


def test_a_model_that_passes_by_its_blocks_is_not_said_to_be_checkpointed(trial_of: Any) -> None:
    trial = trial_of("in_parts")
    with pytest.raises(Unsupported, match="checkpointing: the model calls the parts of its blocks, and no block"):
        adopted_step.begin(trial, *train_step.random_batches(trial)[0])


def test_compiled_blocks_are_checked_by_eager_references_and_seen_to_be_compiled(trial_of, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    trial = replace(trial_of("whole"), mode="compile-blocks")
    work = train_step.run(trial, Context()).work
    assert (work["ran"]["compiled"], work["graph_breaks"], work["recompiles"]) == (2, 0, 0)
    with pytest.raises(Unsupported, match="compile-blocks: the model calls the parts of its blocks, and no block"):
        train_step.run(replace(trial_of("in_parts"), mode="compile-blocks"), Context())


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ({"parts": "all"}, "compile-blocks: fused kernels compute these blocks"),
        ({"parallel": "ddp", "world": 2}, "compile-blocks: blocks are compiled one by one in a single"),
        ({"model": "checkpointed_blocks:bare"}, "compile-blocks: Sequential has no nn.ModuleList of blocks"),
    ],
)
def test_what_has_no_blocks_to_compile_is_unsupported(problem, reason, trial_of):
    trial = replace(trial_of("whole").with_(checkpointing=None, **problem), mode="compile-blocks")
    with pytest.raises(Unsupported, match=reason):
        trial_model.require_supported(trial)


def bert(folder: Path, layers: int, hidden: int, seed: int = 0, **problem: Any) -> Trial:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "hidden_size": hidden, "intermediate_size": 2 * hidden, "max_position_embeddings": 64}
    config = transformers.BertConfig(**sizes, num_hidden_layers=layers, num_attention_heads=hidden // 16)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(folder)
    model = adoptee(Options(device="cpu", model=str(folder)))
    problem = {"batch": 4, "block": 32, "vocab": 128, "padded_vocab": 128, **problem, **model.source.settings}
    return Trial(workload="train_step", device="cpu", problem=problem, attention=OWN_ATTENTION, seed=seed)


@pytest.mark.usefixtures("asked_here")
def test_rounding_of_a_bias_without_a_gradient_is_no_fault_of_another_attention_in_float32(tmp_path, monkeypatch):
    """The gradient of a key's bias is 0 but for rounding, of which each attention leaves its own."""
    ratios: list[float] = []
    for seed in (4, 5):
        trial = replace(bert(tmp_path, layers=2, hidden=64, seed=seed, batch=2, block=64), precision="fp32")
        _, check = adopted_step.begin(trial, *train_step.random_batches(trial)[0])
        ratios += [
            q["error"] / q["limit"] for q in check["quantities"] if q["name"].endswith("key.bias, rounding alone")
        ]
    assert len(ratios) == 2 * 2
    assert 0.1 < max(ratios) < 0.8
    made = trial_model.step_of

    def shifted(trial: Trial) -> Any:
        step = made(trial)
        bias = step.model.get_parameter("module.bert.encoder.layer.0.attention.self.key.bias")
        bias.register_hook(lambda gradient: gradient + 1e-6)
        return step

    monkeypatch.setattr(trial_model, "step_of", shifted)
    with pytest.raises(CheckFailed, match=r"layer\.0\.attention\.self\.key\.bias, rounding alone: error"):
        adopted_step.begin(trial, *train_step.random_batches(trial)[0])


@pytest.mark.usefixtures("asked_here")
def test_norms_in_half_precision_are_no_fault_of_a_deep_model(tmp_path: Path) -> None:
    """A post-norm model's residual stream goes through every norm: te's, in bf16, round it where its own keep float32."""
    trial = bert(tmp_path, layers=12, hidden=32, parts="all")
    _, check = adopted_step.begin(trial, *train_step.random_batches(trial)[0])
    scales = [q["error"] / q["limit"] for q in check["quantities"] if q["name"].endswith("scale")]
    assert len(scales) > 12 * 10
    assert max(scales) < 0.8


TOKENS = {"vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
APERTUS = {"model_type": "apertus", "architectures": ["ApertusForCausalLM"], "num_key_value_heads": 2, **SIZES}
DIFFLLAMA = {**SIZES, "model_type": "diffllama", "architectures": ["DiffLlamaForCausalLM"], "num_hidden_layers": 2}


def of_config(folder: Path, config: dict[str, Any], precision: str) -> Trial:
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps({**TOKENS, **config}))
    model = adoptee(Options(device="cpu", model=str(folder)))
    problem = {"batch": 4, "block": 24, "vocab": 64, "padded_vocab": 64, "grad_clip": 0.0, **model.source.settings}
    return Trial(workload="train_step", device="cpu", problem=problem, attention=OWN_ATTENTION, precision=precision)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("config", "precision"),
    [(APERTUS, "bf16"), (APERTUS, "fp32"), (DIFFLLAMA, "bf16")],
)
def test_gradients_of_few_numbers_are_held_to_many_passes_of_the_yardstick(config, precision, tmp_path):
    """One pass does not tell how far rounding moves one number, or many that err as one."""
    trial = of_config(tmp_path, config, precision)
    assert adopted_step.begin(trial, *train_step.random_batches(trial)[0])[1]["quantities"]


FAULTS: dict[str, Any] = {
    "mlp.act_fn.alpha_n": lambda gradient: -gradient,
    "mlp.up_proj.weight": lambda gradient: 1.05 * gradient,
    "self_attn.lambda_q1": lambda gradient: gradient.roll(1),
    "input_layernorm.weight": lambda gradient: gradient.index_fill(0, torch.tensor([3]), 0.0),
}


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (APERTUS, "mlp.act_fn.alpha_n"),
        (APERTUS, "mlp.up_proj.weight"),
        (DIFFLLAMA, "self_attn.lambda_q1"),
        (DIFFLLAMA, "input_layernorm.weight"),
    ],
)
def test_a_wrong_gradient_beside_those_of_few_numbers_is_caught(config, fault, tmp_path, monkeypatch):
    trial, usual = of_config(tmp_path, config, "bf16"), TrainStep.gradients

    def wrong(self: TrainStep, *batch: Any, **how: Any) -> Any:
        loss, found = usual(self, *batch, **how)
        name = f"module.model.layers.0.{fault}"
        return loss, found | {name: FAULTS[fault](found[name])}

    monkeypatch.setattr(TrainStep, "gradients", wrong)
    with pytest.raises(CheckFailed, match=rf"layers\.0\.{fault}"):
        adopted_step.begin(trial, *train_step.random_batches(trial)[0])
