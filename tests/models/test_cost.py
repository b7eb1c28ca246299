"""The floor's FLOP and bytes, and the bytes held, against the model itself and counts by hand."""

import dataclasses
from typing import Any

import pytest
import torch
from kept_bytes import kept
from table_adamw_cases import DELAYED, OPTIM, SMALL
from torch import Tensor
from whole_recipes import WHOLE

from te_bench.kernels.linear_cross_entropy.autograd import chunk_rows
from te_bench.kernels.linear_cross_entropy.backends import chunked
from te_bench.kernels.linear_cross_entropy.backends import fp8 as fp8_head
from te_bench.models import cost, decoder
from te_bench.models import recipe as recipes
from te_bench.models.configs import CONFIGS, DecoderConfig, LlamaConfig
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


#: Llama's with a head of its own, and with norms of heads whose features are not hidden / heads.
LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    block_size=72, vocab_size=50,
)  # fmt: skip
QWEN = dataclasses.replace(LLAMA, head_dim=16, qk_norm=True, tie_word_embeddings=True)
#: recipe -> what `memory` is told of it.
RECIPES: dict[str | None, dict[str, Any]] = {
    None: {"fp8": False},
    **{
        name: {"fp8": True, "known": recipes.load(name).delayed(), "granularity": recipes.load(name).granularity}
        for name in WHOLE
    },
}


def a_step(
    config: DecoderConfig, recipe: str | None, weights: str | None = None, states: str | None = None
) -> TrainStep:
    torch.manual_seed(0)
    found = None if recipe is None else recipes.load(recipe)
    options: dict[str, Any] = {"padded_vocab_size": 64, "recipe": found, "head": "chunked", "blocks": "fused"}
    model = decoder.build(config, attention="manual", **options)
    if weights:
        model.halve()
    how: dict[str, Any] = {"mode": "eager", "optimizer": "reference", "states": states}
    return TrainStep(model, OPTIM, precision="fp8" if recipe else "bf16", **how)


def copies(step: TrainStep) -> list[Tensor]:
    """The weights that an optimizer leaves for the GEMMs."""
    assert step.table is not None
    made = step.table.copies.values()
    found = [c.leaf for c in made if c.fp8 is None]
    return found + [t for c in made if c.fp8 is not None for t in (c.fp8.kept.data, c.fp8.kept.data_t)]


#: A row of each matrix of which is a multiple of 64.
WIDE = dataclasses.replace(LLAMA, hidden_size=64, intermediate_size=128, head_dim=16)


@pytest.mark.usefixtures("plain_heads")
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name is None or not name.endswith("dpa")])
@pytest.mark.parametrize(
    ("config", "weights"), [(SMALL, None), (LLAMA, None), (QWEN, None), (WIDE, "bf16")],
    ids=["gpt", "llama", "qwen", "bf16 weights"],
)  # fmt: skip
def test_what_the_blocks_keep_is_what_is_counted(config, weights, recipe):
    """Every storage that autograd keeps from fused blocks, once each; of weights those that no optimizer left."""
    step, batch = a_step(config, recipe, weights), 2
    found = kept(step, torch.randint(0, config.vocab_size, (batch, config.block_size)))
    more = RECIPES[recipe] | {"weights": weights}
    counted = held(config=config, batch=batch, padded=64, fp8_head=False, logits=1, **more)
    blocks = ("residual stream", "attention", "the activation's input", "operands of weight gradients")
    weights = counted["weights for GEMMs"] - sum(t.nbytes for t in copies(step))
    assert sum(size for _, size in found) == weights + sum(counted[name] for name in blocks)
    assert (weights > 0) is (recipe is not None and not recipes.load(recipe).delayed())


def test_a_layer_of_llama_3_8b_by_hand() -> None:
    """At 8,192 tokens: 0.907 GiB in bf16 and 0.876 under delayed scaling; 14,336 bytes a token more where FP8 is kept."""
    config = dataclasses.replace(CONFIGS["llama3-8b"], num_hidden_layers=1)  # type: ignore[call-arg]
    blocks = ("residual stream", "attention", "the activation's input", "operands of weight gradients")
    sums = {}
    for recipe in (None, DELAYED, "float8_current_scaling", "rowwise_scaling", "float8_block_scaling"):
        counted = held(config=config, batch=1, padded=128256, fp8_head=False, logits=1, **RECIPES[recipe])
        before = 4 * 8192 * 4096 + 4 * 8192  # the stream that comes in, and the last norm's rstd
        sums[recipe] = sum(counted[name] for name in blocks) - before
    gib = {recipe: round(size / 2**30, 3) for recipe, size in sums.items()}
    assert (gib[None], gib[DELAYED]) == (0.907, 0.876)
    activation, read = 8192 * 14336, 3 * 4096 + 14336
    assert sums["float8_current_scaling"] == sums[DELAYED] + activation
    assert sums["rowwise_scaling"] == sums[DELAYED] + activation + 4 * read
    assert sums["float8_block_scaling"] == sums[DELAYED] + activation + 4 * read * 8192 // 128


@pytest.mark.parametrize("recipe", [None, DELAYED])
@pytest.mark.parametrize(("weights", "states"), [(None, None), ("bf16", "bf16"), ("bf16", "fp8"), (None, "fp8")])
def test_weights_moments_and_copies_are_the_optimizers(weights, states, recipe):
    step = a_step(WIDE, recipe, weights, states)
    assert step.table is not None
    more = RECIPES[recipe] | {"weights": weights, "states": states}
    counted = held(config=WIDE, batch=2, padded=64, fp8_head=False, logits=1, **more)
    moments = [t for p, state in step.table.state.items() if p != "step" for t in state.values()]
    for what, tensors in (
        ("weights", list(step.model.parameters())),
        ("AdamW's moments", moments),
        ("weights for GEMMs", copies(step)),
    ):
        assert counted[what] == sum(t.nbytes for t in tensors), what


def test_llama_3_8b_fits_where_its_weights_and_states_are_in_fewer_bits() -> None:
    """8.03 B parameters at 1 x 8192 tokens, on a GPU of 141 GB, in FP8 with delayed scaling."""
    config = CONFIGS["llama3-8b"]
    gib = {}
    for weights, states in ((None, None), ("bf16", "bf16"), ("bf16", "fp8")):
        counted = held(
            config=config, batch=1, padded=128256, fp8=True, fp8_head=True, logits=1, weights=weights, states=states
        )
        gib[weights, states] = sum(counted.values()) / 2**30
    assert gib[None, None] == pytest.approx(124.7, abs=1)  # and what a captured graph's pool takes: too much
    assert gib["bf16", "bf16"] == pytest.approx(76.5, abs=1)
    assert gib["bf16", "bf16"] - gib["bf16", "fp8"] == pytest.approx(8.03e9 * (4 - 2.125) / 2**30, rel=1e-3)
    update = {
        states: {c.kind: c.bytes for c in cost.step(
            config, batch=1, padded_vocab=128256, fp8=False, fp8_head=False, clipped=False, weights="bf16", states=states
        )}[OPTIMIZER] / cost.parameters(config, 128256)
        for states in ("bf16", "fp8")
    }  # fmt: skip
    assert update == {"bf16": 14, "fp8": pytest.approx(10.25)}


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
    assert ours["the activation's input"] == 12 * 8 * tokens
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
