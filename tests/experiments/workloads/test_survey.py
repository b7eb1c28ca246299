"""A survey of a model: what its step is made of, counted as it runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.experiments.measurement import Context
from te_bench.experiments.spec import OWN_ATTENTION, Trial
from te_bench.experiments.workloads import survey
from te_bench.experiments.workloads.survey import look
from te_bench.models import adopted
from te_bench.models.sources import identify


@pytest.fixture(autouse=True)
def _any_kernel() -> None:
    """A user's model that another test trained has chosen the kernels of SDPA for the process."""
    adopted.pin(adopted.OWN)


TOKENS = torch.arange(32).view(2, 16) % 11


class Model(nn.Module):
    """A language model of one block, whose attention, dropout and head are what the test says."""

    def __init__(self, *, mask: bool = False, written_out: bool = False, dropout: float = 0.0):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 11, bias=False)
        self.mask, self.written_out, self.dropout = mask, written_out, nn.Dropout(dropout)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        q, k, v = (t.view(2, 16, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.written_out:
            y = (q @ k.mT).softmax(-1) @ v
        else:
            mask = torch.ones(16, 16, dtype=torch.bool).tril() if self.mask else None
            y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout.p, is_causal=mask is None)
        x = self.dropout(y.transpose(1, 2).reshape(2, 16, 16))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def looked(**how: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return look(Model(**how), TOKENS, TOKENS, "bf16")


def test_linears_are_counted_and_the_head_is_apart() -> None:
    found = looked()
    (qkv,) = found["linears"]
    assert qkv == {"rows": 32, "in_features": 16, "out_features": 48, "calls": 1, "kept": 0, "names": ["qkv"]}
    assert found["head"] == {"rows": 32, "in_features": 16, "out_features": 11}
    assert found["vocab"] == 11
    assert found["losses"] == [{"classes": 11, "dtype": "float32", "elements": 32 * 11}]


def test_attention_says_its_kernel_and_what_it_was_given() -> None:
    (call,) = looked()["attentions"]
    shape = {name: call[name] for name in ("batch", "heads", "kv_heads", "length", "keys", "head_dim")}
    assert shape == {"batch": 2, "heads": 2, "kv_heads": 2, "length": 16, "keys": 16, "head_dim": 8}
    assert (call["dtype"], call["causal"], call["mask"], call["kernel"]) == ("bfloat16", True, False, "flash")
    (masked,) = looked(mask=True)["attentions"]
    assert masked["mask"]
    (dropped,) = looked(dropout=0.1)["attentions"]
    assert (dropped["kernel"], dropped["dropout"]) == ("math", 0.1)  # a CPU's kernel has no dropout


def test_attention_that_is_written_out_is_seen() -> None:
    found = looked(written_out=True)
    assert found["attentions"] == []
    assert found["written_out"] == 1
    assert looked()["written_out"] == 0
    assert looked(dropout=0.1)["written_out"] == 0  # the softmax is SDPA's own


def test_norms_under_autocast_and_dropout_and_no_hook_is_left_behind() -> None:
    found, model = looked(dropout=0.25), Model().bfloat16()
    assert found["norms"] == 2 * 16 * 16
    assert found["dropout"] == {"dropout": 0.25}
    assert look(model, TOKENS, TOKENS, "bf16")["norms_in_float32"] <= found["norms"]
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("fused", [True, False])
def test_the_models_own_optimizer_is_asked_unless_that_asks_for_more(fused: bool) -> None:
    class Own(Model):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), fused=fused)

    assert look(Own(), TOKENS, TOKENS, "bf16")["optimizer"] == {"name": "AdamW", "fused": fused}
    Own.configure_optimizers = lambda self, rate: pytest.fail("called")
    assert look(Own(), TOKENS, TOKENS, "bf16")["optimizer"] is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("model", ["tiny", "llama-tiny"])
def test_te_benchs_own_models(model: str, device: str) -> None:
    problem: dict[str, Any] = {"model": model, "batch": 2, "block": 32, "vocab": 250, "padded_vocab": 256}
    trial = Trial(workload="survey", device=device, problem=problem, attention="flash", protocol="once")
    work = survey.run(trial, Context()).work
    again = dataclasses.replace(trial, problem={**problem, "checkpointing": "blocks"})
    assert survey.run(again, Context()).work == work  # of a pass that keeps less
    assert sum(found["calls"] for found in work["linears"]) == 8  # of two layers
    assert work["head"] == {"rows": 64, "in_features": 64, "out_features": 256}
    assert sum(call["calls"] for call in work["attentions"]) == 2
    assert {call["kernel"] for call in work["attentions"]} == {"flash"}


@pytest.mark.parametrize(
    ("kind", "more", "head"),
    [
        ("llama", {"architectures": ["LlamaForCausalLM"]}, "lm_head"),
        ("gemma2", {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16}, None),  # it caps its logits
        ("bert", {"architectures": ["BertForMaskedLM"]}, None),
    ],
)
def test_the_head_of_a_users_model_that_te_convert_replaces(
    kind: str, more: dict[str, Any], head: str | None, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": kind, "vocab_size": 128, "max_position_embeddings": 32, **sizes, **more}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    source = identify(str(tmp_path))
    assert source is not None
    problem: dict[str, Any] = {"batch": 2, "block": 16, "vocab": 128, "padded_vocab": 128, **source.settings}
    trial = Trial(workload="survey", device="cpu", problem=problem, attention=OWN_ATTENTION, protocol="once")
    assert survey.run(trial, Context()).work["converted_head"] == head
