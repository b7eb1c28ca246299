"""The check of a user's step that is asked to compute its activations again."""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from te_bench.experiments import trial_model
from te_bench.experiments.adoption import adoptee
from te_bench.experiments.checks import adopted_step, seeds
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


class Frozen(Model):
    def __init__(self):
        super().__init__(True)
        self.blocks[0].requires_grad_(False)


class Adapted(nn.Module):  # as LoRA begins: nothing reaches the first weight, for the last is zero
    def __init__(self, whole):
        super().__init__()
        self.whole, self.scale = whole.requires_grad_(False), nn.Parameter(torch.ones(64))
        self.first, self.last = nn.Linear(32, 4, bias=False), nn.Linear(4, 64, bias=False)
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        return self.scale * self.whole(x) + self.last(self.first(x))


def adapted():
    model = Model(True)
    for block in model.blocks:
        block.up = Adapted(block.up)
    return model


class Counting(Model):  # as spectral_norm: each pass changes a buffer that it computes by
    def __init__(self):
        super().__init__(True)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, tokens):
        self.passes += 1
        return super().forward(tokens) * (1 - 0.5**self.passes)


class CountingAside(Counting):
    def __init__(self):
        super().__init__()
        del self.passes
        self.passes = 0


class Dropped(Model):
    def __init__(self, used=True):
        super().__init__(True)
        self.dropout, self.used = nn.Dropout(0.1), used

    def forward(self, tokens):
        x = super().forward(tokens)
        return self.dropout(x) if self.used else x


def with_idle_dropout():
    return Dropped(False)


class Filled(Model):  # as XGLM, with a number of the dtype's in a tensor of no said dtype
    def __init__(self):
        super().__init__(True)

    def forward(self, tokens):
        x = super().forward(tokens)
        return torch.maximum(x, torch.full((), torch.finfo(x.dtype).min))


class Normed(Model):  # over the sequences of a batch, of which one has no variance
    def __init__(self):
        super().__init__(True)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, tokens, targets):
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)), targets[:, 0])


class Judged(Model):  # a loss of its own, which knows no target to ignore
    def __init__(self):
        super().__init__(True)

    def forward(self, tokens, targets):
        return -super().forward(tokens).log_softmax(-1).gather(-1, targets[..., None]).mean()


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


@pytest.mark.parametrize(("precision", "recipe"), [("fp32", None), ("bf16", None), ("fp8", "delayed_scaling")])
def test_a_model_that_cannot_pass_one_sequence_is_checked(precision, recipe, trial_of) -> None:
    trial = replace(trial_of("Normed").with_(checkpointing=None, batch=16), precision=precision, recipe=recipe)
    step, check = adopted_step.begin(trial, *train_step.random_batches(trial)[0])
    assert {q["name"] for q in check["quantities"]} >= {"loss", "grad module.norm.weight"}
    assert step.model.get_buffer("module.norm.num_batches_tracked") == 0


def test_one_sequence_that_a_model_cannot_pass_is_refused_with_what_to_do(trial_of: Any) -> None:
    trial = trial_of("Normed").with_(checkpointing=None, batch=1, accumulate=2)
    said = "^checkpointed_blocks:Normed: a pass of one sequence raised ValueError: Expected more than 1 value.*; "
    with pytest.raises(Unsupported, match=f"{said}take --batch 2 or more$"):
        adopted_step.begin(trial, *train_step.random_batches(trial)[0])


def test_blocks_that_are_called_pass(trial_of: Any) -> None:
    trial = trial_of("whole")
    _, check = adopted_step.begin(trial, *train_step.random_batches(trial)[0])
    assert check["quantities"]


def test_gradients_of_nothing_are_no_rounding_that_is_too_small(trial_of: Any) -> None:
    trial = replace(trial_of("Closed"), precision="fp8", recipe="float8_current_scaling")
    assert train_step.run(trial, Context()).work["ran"]["gemm_fp8"]


def test_a_step_that_trains_what_the_model_keeps_frozen_fails_though_nothing_clips(trial_of, monkeypatch):
    trial = trial_of("Frozen").with_(grad_clip=0.0)
    assert adopted_step.begin(trial, *train_step.random_batches(trial)[0])[1]["quantities"]
    made = trial_model.model_of
    monkeypatch.setattr(trial_model, "model_of", lambda trial: made(trial).requires_grad_(True))
    with pytest.raises(CheckFailed, match=r"^grad module\.blocks\.0\.\w+\.\w+, which has none: error"):
        adopted_step.begin(trial, *train_step.random_batches(trial)[0])


def without_its_scale(up: Any) -> None:
    """The output is not multiplied by the scale, which begins with ones; its gradient is right."""

    def forward(x: Any) -> Any:
        y = up.whole(x)
        return y + y.detach() * (up.scale - up.scale.detach()) + up.last(up.first(x))

    up.forward = forward


def five_times_the_gradient(up: Any) -> None:
    up.first.weight.register_hook(lambda gradient: 5 * gradient)


@pytest.mark.parametrize("fault", [None, without_its_scale, five_times_the_gradient])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_wrong_but_for_weights_of_ones_or_zeros_fails(fault, precision, trial_of, monkeypatch):
    """No step trains with such weights after its first update."""
    trial = replace(trial_of("adapted").with_(checkpointing=None), precision=precision)
    made, begun = trial_model.step_of, []

    def step_of(trial: Trial) -> TrainStep:
        step = made(trial)
        begun.extend(p.detach().clone() for p in step.model.parameters())
        if fault is not None:
            fault(step.model.get_submodule("module.blocks.0.up"))
        return step

    monkeypatch.setattr(trial_model, "step_of", step_of)
    batch = train_step.random_batches(trial)[0]
    if fault is None:
        step, _ = adopted_step.begin(trial, *batch)
        assert all(map(torch.equal, step.model.parameters(), begun))
    else:
        with pytest.raises(CheckFailed, match=r"^grad module"):
            adopted_step.begin(trial, *batch)


@pytest.mark.parametrize(
    ("precision", "recipe", "accumulate"), [("fp32", None, 2), ("bf16", None, 1), ("fp8", "delayed_scaling", 1)]
)
def test_a_buffer_that_passes_change_is_the_step_s_and_the_references(precision, recipe, accumulate, trial_of) -> None:
    how = {"checkpointing": None, "accumulate": accumulate, "batch": 4}
    trial = replace(trial_of("Counting").with_(**how), precision=precision, recipe=recipe)
    step, check = adopted_step.begin(trial, *train_step.random_batches(trial)[0])
    assert check["quantities"]
    assert step.model.get_buffer("module.passes") == 0


def test_a_counter_that_is_no_buffer_is_not_said_to_be_random(trial_of: Any) -> None:
    trial = trial_of("CountingAside")
    with pytest.raises(Unsupported, match=r"a pass changes what the next one computes \(a counter, a list\)"):
        adopted_step.begin(trial, *train_step.random_batches(trial)[0])


def test_a_step_that_lost_its_model_s_dropout_fails_and_dropout_that_no_pass_uses_is_none(trial_of, monkeypatch):
    for factory in ("Dropped", "with_idle_dropout"):
        trial = trial_of(factory)
        step, _ = adopted_step.begin(trial, *train_step.random_batches(trial)[0])
        assert step.model.has_dropout
    made = trial_model.model_of

    def without(trial: Trial) -> Any:
        model = made(trial)
        model.get_submodule("module").dropout = torch.nn.Identity()
        return model

    monkeypatch.setattr(trial_model, "model_of", without)
    trial = trial_of("Dropped")
    with pytest.raises(CheckFailed, match="the masks of dropout do not depend on the seed 0"):
        adopted_step.begin(trial, *train_step.random_batches(trial)[0])
    adopted_step.begin(trial_of("with_idle_dropout"), *train_step.random_batches(trial)[0])


def test_masks_that_change_gradients_alone_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss in bf16 may be the same number by every mask."""
    step = Mock(model=torch.nn.Linear(2, 2), gradients=lambda *_: (2.0, {"weight": torch.rand(2, 2)}))
    seeds.require_masks(step, 0, torch.zeros(1), torch.zeros(1))
    monkeypatch.setattr(step, "gradients", lambda *_: (2.0, {"weight": torch.ones(2, 2)}))
    with pytest.raises(CheckFailed, match="the masks of dropout do not depend on the seed 0"):
        seeds.require_masks(step, 0, torch.zeros(1), torch.zeros(1))


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


def of_config(folder: Path, config: dict[str, Any], precision: str, seed: int = 0) -> Trial:
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps({**TOKENS, **config}))
    model = adoptee(Options(device="cpu", model=str(folder)))
    problem = {"batch": 4, "block": 24, "vocab": 64, "padded_vocab": 64, "grad_clip": 0.0, **model.source.settings}
    how: dict[str, Any] = {"attention": OWN_ATTENTION, "precision": precision, "seed": seed}
    return Trial(workload="train_step", device="cpu", problem=problem, **how)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("config", "precision", "seed"),
    [(APERTUS, "bf16", 0), (APERTUS, "fp32", 0), *((DIFFLLAMA, "bf16", seed) for seed in range(4))],
)
def test_gradients_of_few_numbers_are_held_to_many_passes_of_the_yardstick(config, precision, seed, tmp_path):
    """One pass does not tell how far rounding moves one number, or many that err as one."""
    trial = of_config(tmp_path, config, precision, seed)
    assert adopted_step.begin(trial, *train_step.random_batches(trial)[0])[1]["quantities"]


FAULTS: dict[str, Any] = {
    "mlp.act_fn.alpha_n": lambda gradient: -gradient,
    "mlp.up_proj.weight": lambda gradient: 1.05 * gradient,
    "self_attn.lambda_q1": lambda gradient: gradient.roll(1),
    # Of median size: rounding hides the smallest.
    "input_layernorm.weight": lambda gradient: gradient.index_fill(0, gradient.abs().median(0).indices, 0.0),
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


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0}
T5 |= {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 1, "feed_forward_proj": "gated-gelu"}


def by_all_tokens(step: TrainStep) -> None:
    mean = step.model.module.loss_function

    def loss(*_: Any, shift_labels: torch.Tensor, **given: Any) -> torch.Tensor:
        return mean(*_, shift_labels=shift_labels, num_items_in_batch=shift_labels.numel(), **given)

    step.model.module.loss_function = loss


def as_token_0(step: TrainStep) -> None:
    mean = step.model.module.loss_function

    def loss(*_: Any, shift_labels: torch.Tensor, **given: Any) -> torch.Tensor:
        return mean(*_, shift_labels=shift_labels.clamp(min=0), **given)

    step.model.module.loss_function = loss


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("fault", "precision", "recipe"),
    [
        (None, "fp8", "float8_current_scaling"),
        (by_all_tokens, "bf16", None),
        (by_all_tokens, "fp8", "float8_current_scaling"),
        (as_token_0, "bf16", None),
    ],
)
def test_a_step_that_counts_ignored_targets_fails(fault, precision, recipe, tmp_path, monkeypatch):
    trial = replace(of_config(tmp_path, LLAMA, precision).with_(accumulate=2), recipe=recipe)
    made = trial_model.step_of

    def step_of(trial: Trial) -> TrainStep:
        step = made(trial)
        if fault is not None:
            fault(step)
        return step

    monkeypatch.setattr(trial_model, "step_of", step_of)
    batch = train_step.random_batches(trial)[0]
    if fault is None:
        check = adopted_step.begin(trial, *batch)[1]
        assert "a quarter of the targets ignored" in check["reference"]
    else:
        with pytest.raises(CheckFailed, match=r"^(loss|grad)"):
            adopted_step.begin(trial, *batch)


@pytest.mark.usefixtures("asked_here")
def test_labels_of_a_decoder_are_ignored_in_part(tmp_path: Path) -> None:
    trial = of_config(tmp_path, T5, "bf16")
    assert "targets ignored" in adopted_step.begin(trial, *train_step.random_batches(trial)[0])[1]["reference"]


@pytest.mark.parametrize(
    ("factory", "tokens", "ignored"),
    [("Judged", 8, False), ("whole", 8, True), ("whole", 4, True), ("whole", 3, False)],
)
def test_no_target_is_ignored_of_a_loss_of_the_model_s_own_or_of_short_sequences(factory, tokens, ignored, trial_of):
    trial = trial_of(factory).with_(checkpointing=None, batch=32, block=tokens)
    _, check = adopted_step.begin(trial, *train_step.random_batches(trial)[0])
    assert ("targets ignored" in check["reference"]) == ignored


@pytest.mark.usefixtures("asked_here")
def test_no_target_is_ignored_of_a_forward_that_a_user_wrote_for_a_class_of_transformers(tmp_path, monkeypatch) -> None:
    """Its loss may ignore another index: then -100 is no token."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_forward.py").write_text(
        f"""
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput


class PlainForCausalLM(LlamaForCausalLM):
    pass


class OwnForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **_):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return CausalLMOutput(loss=cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1), logits=logits)


def plain():
    return PlainForCausalLM(LlamaConfig(**{TOKENS | SIZES}))


def own():
    return OwnForCausalLM(LlamaConfig(**{TOKENS | SIZES}))
"""
    )
    for factory in ("plain", "own"):
        source = Source(model=f"own_forward:{factory}", sha256="0")
        problem = {"batch": 4, "block": 24, "vocab": 64, "padded_vocab": 64, **source.settings}
        trial = Trial(workload="train_step", device="cpu", problem=problem, attention=OWN_ATTENTION)
        _, check = adopted_step.begin(trial, *train_step.random_batches(trial)[0])
        assert ("targets ignored" in check["reference"]) == (factory == "plain")
    sys.modules.pop("own_forward", None)
