"""Attention in FP8 under a recipe's fp8_dpa: in a GPT, in te's modules, in what a trial is held to, and nowhere else."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import te_bench.models as te
from te_bench.experiments import trial_model
from te_bench.experiments.spec import Trial
from te_bench.kernels import attention
from te_bench.kernels.attention.backends import manual_fp8
from te_bench.models import recipe
from te_bench.models.recipe import Recipe
from te_bench.models.zoo.gpt import GPT, GPTConfig

IN_FP8 = [recipe.Float8CurrentScaling(fp8_dpa=True), recipe.DelayedScaling(fp8_dpa=True)]
CURRENT = recipe.Float8CurrentScaling()
CONFIG = GPTConfig(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_embd=32)


def a_gpt(asked: Recipe | None, kernel: str = "flash", **options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG, attention=kernel, recipe=asked, **options)


def a_loss(model: GPT, enabled: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(50, (2, 2, 16), generator=generator)
    with model.autocast(enabled):
        loss: Tensor = model(tokens, targets)
    return loss


def heads(length: int = 24, batch: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, batch, 4, 16, generator=generator).requires_grad_() for _ in range(3)]


# GPT


@pytest.mark.parametrize("blocks", [None, "fused"])
def test_a_gpt_attends_in_fp8_under_its_recipe_and_only_there(blocks: str | None) -> None:
    asked, plain = a_gpt(IN_FP8[0], blocks=blocks), a_gpt(CURRENT, blocks=blocks)
    given = a_gpt(CURRENT, "manual_fp8", blocks=blocks)
    assert a_loss(asked) == a_loss(given) != a_loss(plain)
    assert a_loss(asked, enabled=False) == a_loss(plain, enabled=False) != a_loss(given, enabled=False)
    for model in (asked, given):
        a_loss(model).backward()
    for mine, theirs in zip(asked.parameters(), given.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_backend_of_fp8_stays_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = a_gpt(IN_FP8[0], "triton_fp8")
    called: list[str] = []
    triton = attention.load("triton_fp8")
    spied = dataclasses.replace(triton, forward=lambda *x, **o: called.append("triton_fp8") or triton.forward(*x, **o))
    monkeypatch.setattr("te_bench.models.fp8_attention.load", lambda name: spied if name == "triton_fp8" else None)
    asked = a_gpt(IN_FP8[0], "triton_fp8")
    a_loss(asked)
    assert called == ["triton_fp8"] * 2


# te


@pytest.mark.parametrize("asked", IN_FP8, ids=lambda r: type(r).__name__)
def test_dot_product_attention_computes_in_fp8_where_the_recipe_says_so(asked: Recipe) -> None:
    layer = te.DotProductAttention(4, 16)
    q, k, v = heads()
    right = manual_fp8.forward(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), causal=True, scale=0.25)
    right = right.permute(2, 0, 1, 3).flatten(2)
    with te.autocast(recipe=asked):
        out = layer(q, k, v)
        again = layer(q, k, v, checkpoint_core_attention=True)
        said = layer.backend_report(q, k, v)
    assert torch.equal(out, right)
    assert torch.equal(again, right)
    assert said.chosen == "manual_fp8"
    assert "fp8_dpa" in said.reasons["flash"]
    ours, theirs, recomputed = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, right, again))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(ours, theirs, recomputed, strict=True))
    exact = layer(q, k, v)
    assert not torch.equal(out, exact)
    for other in (te.autocast(recipe=CURRENT), te.autocast(enabled=False, recipe=asked)):
        with other:
            assert torch.equal(layer(q, k, v), exact), "off unless asked for"


def test_what_it_cannot_do_it_refuses_and_nothing_steps_in() -> None:
    q, k, v = heads()
    mask = torch.zeros(2, 1, 1, 24, dtype=torch.bool)
    with te.autocast(recipe=IN_FP8[0]):
        with pytest.raises(ValueError, match="fp8_dpa=True, but manual_fp8 can't do this: mask"):
            te.DotProductAttention(4, 16, attn_mask_type="padding")(q, k, v, attention_mask=mask)
        with pytest.raises(ValueError, match=r"can't do this: dropout 0.1"):
            te.DotProductAttention(4, 16, attention_dropout=0.1)(q, k, v)
        with pytest.raises(ValueError, match="can't do this: mask"):  # which the backend would have of a window
            te.DotProductAttention(4, 16, window_size=(4, 0))(q, k, v)
        packed = te.DotProductAttention(4, 16, qkv_format="thd", attn_mask_type="padding_causal")
        rows, starts = [x.flatten(0, 1) for x in (q, k, v)], torch.tensor([0, 24, 48])
        with pytest.raises(ValueError, match="can't do this: mask"):
            packed(*rows, cu_seqlens_q=starts, cu_seqlens_kv=starts)
        with pytest.raises(ValueError, match=r"attention_kernel\('flash'\) has no FP8"), te.attention_kernel("flash"):
            te.DotProductAttention(4, 16)(q, k, v)
        with te.attention_kernel("triton_fp8"):
            out = te.DotProductAttention(4, 16, attn_mask_type="no_mask")(q, k, v)
    assert out.isfinite().all()
    for asked in IN_FP8:
        assert "FP8 needs compute capability 8.9" in str(asked.unsupported("cuda", (8, 6)))
        assert asked.unsupported("cuda", (8, 9)) is None
        assert dataclasses.replace(asked, emulate=True).unsupported("cuda", (8, 6)) is None
    with pytest.raises(ValueError, match="fp8_mha=True is not possible"):
        recipe.DelayedScaling(fp8_mha=True)


def test_a_layer_trains_with_it_and_its_attention_compiles() -> None:
    layer = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0)
    core = layer.self_attention.core_attention
    compiled = torch.compile(core, backend="aot_eager", fullgraph=True)
    with te.autocast(recipe=IN_FP8[0]):
        layer(torch.randn(24, 2, 64)).square().mean().backward()
        made = []
        for attend in (compiled, core):
            given = heads()
            y = attend(*given)
            made.append([y, *torch.autograd.grad(y.square().sum(), given)])
    torch.testing.assert_close(*made)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


# What a trial is held to


def test_the_kernels_of_a_trial_are_the_fp8_ones() -> None:
    problem = {"model": "tiny", "batch": 2, "block": 64, "vocab": 250, "padded_vocab": 256}
    trial = Trial(
        workload="train_step",
        device="cuda",
        problem=problem,
        attention="cudnn",
        precision="fp8",
        recipe="delayed_scaling",
    )
    asked = dataclasses.replace(trial, recipe="float8_current_scaling_dpa")
    assert trial_model.attention_of(trial) == "cudnn"
    assert trial_model.attention_of(asked) == "triton_fp8"
    assert trial_model.attention_of(dataclasses.replace(asked, device="cpu")) == "manual_fp8"
    assert trial_model.attention_of(dataclasses.replace(asked, attention="manual_fp8")) == "manual_fp8"
    assert trial_model.attention_of(dataclasses.replace(trial, precision="bf16", recipe=None)) == "cudnn"
    seen = ["fp8_attention_cast_kernel", "fp8_attention_forward_kernel"]
    assert attention.wrong_kernel("triton_fp8", "cuda", seen, eager=True) is None
    assert "asked for cudnn" in str(attention.wrong_kernel("cudnn", "cuda", seen, eager=True))
    both = [*seen, "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"]
    assert "but cudnn ran" in str(attention.wrong_kernel("triton_fp8", "cuda", both, eager=True))
