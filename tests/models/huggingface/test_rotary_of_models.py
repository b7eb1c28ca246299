"""transformers' apply_rotary_pos_emb by the rotary kernel, where a model was converted and nowhere else."""

import copy
from typing import Any

import pytest
import torch
from families import assert_same, draw, inputs, make, run
from torch import nn

import te_bench.models as te
from te_bench.models.huggingface.rotary import apply_rotary_pos_emb

pytest.importorskip("transformers")

from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("d", [8, 16])
def test_it_is_transformers_own(d: int, batch: int, heads_first: bool) -> None:
    """Of all features and some, by positions that a batch shares or not, of a scale that YaRN has."""
    axis = 1 if heads_first else 2
    tensors = [draw(2, heads, 5, 16, seed=heads) for heads in (4, 2)]
    tensors = [x if heads_first else x.transpose(1, 2) for x in tensors]
    angles = draw(batch, 5, d // 2, seed=9)
    cos, sin = (1.2 * torch.cat((f(angles),) * 2, -1) for f in (torch.cos, torch.sin))
    results = []
    for function in (modeling_phi3.apply_rotary_pos_emb, apply_rotary_pos_emb):
        q, k = (x.clone().requires_grad_() for x in tensors)
        turned = function(q, k, cos, sin, unsqueeze_dim=axis)
        sum((y * draw(*y.shape, seed=7)).sum() for y in turned).backward()  # type: ignore[union-attr]
        results.append([*turned, q.grad, k.grad])
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_another_model_keeps_its_own() -> None:
    before = modeling_llama.apply_rotary_pos_emb
    model = make("llama")
    te.convert(model, parts="rotary")
    assert modeling_llama.apply_rotary_pos_emb is before
    assert type(make("llama").model.layers[0].self_attn) is modeling_llama.LlamaAttention
    assert isinstance(model.model.layers[0].self_attn, modeling_llama.LlamaAttention)


def test_positions_of_each_sequence() -> None:
    model = make("llama")
    positions = torch.stack([torch.arange(start, start + 16) for start in (0, 3, 50)])
    loss, gradients = run(model, {**inputs("llama"), "position_ids": positions})
    te.convert(model, parts="rotary")
    again, found = run(model, {**inputs("llama"), "position_ids": positions})
    torch.testing.assert_close(again, loss)
    assert_same(found, gradients, 1e-4)


def test_what_is_not_the_usual_one_stays() -> None:
    from transformers import CohereConfig, CohereForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = CohereForCausalLM(CohereConfig(**sizes, vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    report = te.convert(model, parts="rotary")
    assert report.parts[0].reason == "its apply_rotary_pos_emb is another one than Llama's"
    wrapped = make("llama")
    for layer in wrapped.model.layers:
        layer.self_attn.forward = layer.self_attn.forward
    assert {entry.reason for entry in te.convert(wrapped, parts="rotary").parts} == {"its forward was replaced"}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_on_a_gpu_the_whole_model_in_bf16_is_as_near_to_float32_as_it_was(family: str) -> None:
    exact: nn.Module = make(family, hidden_size=256, intermediate_size=512).cuda()
    given: dict[str, Any] = {name: x.cuda() for name, x in inputs(family).items()}
    _, truth = run(exact, given)
    errors = []
    for parts in ("norm", "rotary", "all"):
        model = copy.deepcopy(exact).bfloat16()
        te.convert(model, parts=parts)
        _, found = run(model, given)
        errors.append({name: (g.float() - truth[name]).norm() / truth[name].norm() for name, g in found.items()})
    for name, own in errors[0].items():
        assert errors[1][name] < 2 * own + 1e-2, name
        assert errors[2][name] < 2 * own + 1e-2, name
