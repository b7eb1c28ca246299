"""The floor's FLOP and bytes, and the bytes held, against the model itself and counts by hand."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from table_adamw_cases import DELAYED, OPTIM, SMALL
from torch import Tensor

from te_bench.kernels.linear_cross_entropy.autograd import chunk_rows
from te_bench.kernels.linear_cross_entropy.backends import chunked
from te_bench.kernels.linear_cross_entropy.backends import fp8 as fp8_head
from te_bench.models import cost
from te_bench.models import recipe as recipes
from te_bench.models.configs import CONFIGS
from te_bench.models.cost import ATTENTION, ELEMENTWISE, GEMM, LOSS, OPTIMIZER, Cost
from te_bench.models.zoo.gpt import GPT
from te_bench.training.step import TrainStep

GPT2 = CONFIGS["gpt2"]


def gpt2(*, fp8: bool, fp8_head: bool = False, batch: int = 12, clipped: bool = False) -> dict[str, Cost]:
    found = cost.step(GPT2, batch=batch, padded_vocab=50304, fp8=fp8, fp8_head=fp8_head, clipped=clipped)
    assert len({c.kind for c in found}) == len(found)
    return {c.kind: c for c in found}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "tiny"])
def test_parameters_are_the_models(name: str, bias: bool) -> None:
    config = dataclasses.replace(CONFIGS[name], bias=bias)
    with torch.device("meta"):
        model = GPT(config, padded_vocab_size=50304)
    assert cost.parameters(config, 50304) == sum(p.numel() for p in model.parameters())


def test_the_gemms_and_attention_are_nanogpts_count() -> None:
    """6 N + 12 L H D T a token, N with the padding and without positions and norms; half the attention, 7 / 6 of it."""
    found = gpt2(fp8=False)
    tokens = 12 * 1024
    matrices = 12 * 12 * 768**2 + 50304 * 768
    assert found[GEMM].bf16_flop == 6 * matrices * tokens
    assert found[ATTENTION].bf16_flop == 12 * 12 * 768 * 1024 * tokens // 2 * 7 // 6
    assert found[GEMM].bytes == found[ATTENTION].bytes == 0


def test_fp8_moves_flop_and_not_their_number() -> None:
    bf16, fp8, all_fp8 = gpt2(fp8=False), gpt2(fp8=True), gpt2(fp8=True, fp8_head=True)
    total = bf16[GEMM].bf16_flop
    assert fp8[GEMM].bf16_flop + fp8[GEMM].fp8_flop == total
    assert fp8[GEMM].bf16_flop == 6 * 12288 * 768 * 50304
    assert all_fp8[GEMM].bf16_flop == 0
    assert all_fp8[GEMM].fp8_flop == total
    # Attention's output and the gradients of q, k and v are read and written once more; GELU has kernels of its own.
    assert fp8[ELEMENTWISE].bytes - bf16[ELEMENTWISE].bytes == 12 * 12288 * 768 * (4 + 12 + 4 * 10)
    for kind in (ATTENTION, LOSS, OPTIMIZER):
        assert fp8[kind] == bf16[kind]


def test_bytes_by_hand() -> None:
    found = gpt2(fp8=False, batch=1)
    assert found[LOSS].bytes == 1024 * 50304 * 4
    assert found[OPTIMIZER].bytes == 28 * cost.parameters(GPT2, 50304) + 2 * (12 * 12 * 768**2 + 50304 * 768)
    clipped = gpt2(fp8=False, batch=1, clipped=True)
    assert clipped[OPTIMIZER].bytes - found[OPTIMIZER].bytes == 4 * cost.parameters(GPT2, 50304)
    # norms 25 x 12; their backward passes 24 x 14 + 10; branches 24 x 2; embeddings 20.
    assert found[ELEMENTWISE].bytes == 1024 * 768 * (300 + 346 + 48 + 20)


# Bytes held


def held(*, fp8: bool, config: Any = GPT2, batch: int = 12, padded: int = 50304, **head: Any) -> dict[str, int]:
    found = cost.memory(config, batch=batch, padded_vocab=padded, fp8=fp8, **head)
    assert len({h.what for h in found}) == len(found)
    return {h.what: h.bytes for h in found}


class Attention(torch.autograd.Function):
    """It keeps what a flash attention keeps: q, k, v, its output and a float32 a row and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)  # as cuDNN's
        y.copy_((q + k + v) / 3)
        ctx.save_for_backward(q, k, v, y, q.new_zeros(q.shape[:3], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, *_ = ctx.saved_tensors
        return tuple((dy / 3).to(q.dtype).clone() for _ in range(3))  # type: ignore[return-value]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_what_the_blocks_keep_is_what_is_counted(fp8: bool) -> None:
    """Every storage that autograd keeps from fused blocks, once each, without the weights."""
    torch.manual_seed(0)
    found = recipes.load(DELAYED) if fp8 else None
    model = GPT(SMALL, attention="manual", padded_vocab_size=64, recipe=found, head="chunked", blocks="fused")
    model.transformer.attention = lambda q, k, v, **_: Attention.apply(q, k, v)
    step = TrainStep(model, OPTIM, precision="fp8" if fp8 else "bf16", mode="eager", optimizer="reference")
    table = step.table
    assert table is not None
    batch = 2
    tokens = torch.randint(0, SMALL.vocab_size, (batch, SMALL.block_size))
    step(tokens, tokens)
    table.prepare()
    copies = [t for c in table.copies.values() for t in (c.leaf, *(c.fp8.kept[:4] if c.fp8 else ()))]
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *copies)}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if t.dim() and t.is_floating_point() and storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    computing = torch.autocast("cpu", torch.bfloat16), model.autocast(), table.computing()
    with contextlib.ExitStack() as inside:
        for region in (torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), *computing):
            inside.enter_context(region)
        hidden = model.hidden(tokens)
    hidden.sum().backward()
    counted = held(fp8=fp8, config=SMALL, batch=batch, padded=64, fp8_head=False, logits=1)
    blocks = ("residual stream", "attention", "GELU's input", "operands of weight gradients")
    assert sum(kept.values()) == sum(counted[name] for name in blocks)


def test_weights_moments_and_copies_are_the_optimizers() -> None:
    for fp8 in (False, True):
        found = recipes.load(DELAYED) if fp8 else None
        model = GPT(SMALL, attention="manual", padded_vocab_size=64, recipe=found, head="chunked", blocks="fused")
        step = TrainStep(model, OPTIM, precision="fp8" if fp8 else "bf16", mode="eager", optimizer="reference")
        table = step.table
        assert table is not None
        copies = [c.leaf for c in table.copies.values() if c.fp8 is None]
        copies += [t for c in table.copies.values() if c.fp8 is not None for t in (c.fp8.kept.data, c.fp8.kept.data_t)]
        counted = held(fp8=fp8, config=SMALL, batch=2, padded=64, fp8_head=False, logits=1)
        moments = [t for p, state in table.state.items() if p != "step" for t in state.values()]
        for what, tensors in (
            ("weights", list(model.parameters())),
            ("AdamW's moments", moments),
            ("weights for GEMMs", copies),
        ):
            assert counted[what] == sum(t.nbytes for t in tensors), what


def test_gpt2s_bytes_by_hand() -> None:
    """12288 tokens x 768, 9.4 million: a byte each is 9 MiB. The bar is 5.5 GiB."""
    n, tokens, head = 12288, 12288 * 768, 50304 * 768
    strip = chunk_rows(n, 50304, 2, fp8_head.STRIP_BYTES)
    logits = chunk_rows(strip, 50304, 2, fp8_head.LOGITS_BYTES)
    chunk = chunk_rows(n, 50304, 1, fp8_head.CHUNK_BYTES)
    assert (chunk, strip, logits) == (12288, 3072, 1536)
    ours = held(fp8=True, fp8_head=True, logits=logits, strip=strip, chunk=chunk)
    assert ours["residual stream"] == tokens * (4 + 12 * 6) + 25 * 8 * n
    assert ours["attention"] == 12 * (8 * tokens + 4 * n * 12)
    assert ours["GELU's input"] == 12 * 8 * tokens
    assert ours["operands of weight gradients"] == 12 * 3 * tokens
    assert ours["head: operands"] == 2 * tokens + 2 * head
    assert ours["head: logits and their gradients"] == 50304 * (2 * 1536 + 3072 + 12288)
    rows = chunk_rows(n, 50304, 2, chunked.LOGITS_BYTES)
    assert rows == 6144
    plain = held(fp8=True, fp8_head=False, logits=rows)
    assert (
        plain["head: logits and their gradients"] + plain["head: its weight's gradient"] == 2 * 50304 * 6144 + 4 * head
    )
    assert sum(plain.values()) < 5.5 * 2**30
    assert sum(ours.values()) == pytest.approx(5.324 * 2**30, rel=1e-3)


QUICKSTART = {"hidden": 4096, "ffn": 16384, "sequence": 2048, "batch": 4}


def test_the_quickstarts_layer_by_hand() -> None:
    """The facts: GEMMs of 9.9 and causal attention of 0.41 TFLOP, to which its backward adds a product computed again."""
    found = {c.kind: c for c in cost.layer(**QUICKSTART, fp8=True)}
    assert found[GEMM].fp8_flop == 6 * 8192 * 12 * 4096**2
    assert found[GEMM].bf16_flop == 0
    assert found[ATTENTION].bf16_flop == pytest.approx(0.4123e12 * 7 / 6, rel=1e-3)
    tokens, wide = 8192 * 4096, 8192 * 16384
    forward = (2 + 2) + (2 + 2) + (2 + 2 + 2 + 2) + (2 + 2 + 2)  # norm; context's cast; sum, norm; sum
    backward = (2 + 2) + (2 + 2 + 2 + 2) + (2 + 2) + 3 * (2 + 2) + (2 + 2 + 2)
    assert found[ELEMENTWISE].bytes == tokens * (forward + backward) + wide * ((2 + 2) + (2 + 2 + 2))
    assert found[cost.WEIGHTS].bytes == 12 * 4096**2 * ((2 + 2) + (2 + 2 + 2))
    assert sum(c.bytes for c in cost.layer(**QUICKSTART, fp8=False)) == 2_281_701_376


def test_the_mlp_is_two_thirds_of_the_gemms_and_has_no_attention() -> None:
    whole, alone = (cost.layer(**QUICKSTART, fp8=True, mlp=mlp) for mlp in (False, True))
    assert [c.kind for c in alone] == [GEMM, ELEMENTWISE, cost.WEIGHTS]
    assert 3 * alone[0].fp8_flop == 2 * whole[0].fp8_flop
    assert alone[1].bytes == 8192 * (4096 * (4 + 6 + 4) + 16384 * 10)
