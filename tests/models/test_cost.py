"""The floor's FLOP and bytes, against the model itself and counts by hand."""

import dataclasses

import pytest
import torch

from te_bench.models import cost
from te_bench.models.configs import CONFIGS
from te_bench.models.cost import ATTENTION, ELEMENTWISE, GEMM, LOSS, OPTIMIZER, Cost
from te_bench.models.gpt import GPT

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
    # Attention's output, and the gradients of q, k and v are read and written once more.
    assert fp8[ELEMENTWISE].bytes - bf16[ELEMENTWISE].bytes == 12 * 12288 * 768 * (4 + 12)
    for kind in (ATTENTION, LOSS, OPTIMIZER):
        assert fp8[kind] == bf16[kind]


def test_bytes_by_hand() -> None:
    found = gpt2(fp8=False, batch=1)
    assert found[LOSS].bytes == 1024 * 50304 * 4
    assert found[OPTIMIZER].bytes == 28 * cost.parameters(GPT2, 50304) + 2 * (12 * 12 * 768**2 + 50304 * 768)
    clipped = gpt2(fp8=False, batch=1, clipped=True)
    assert clipped[OPTIMIZER].bytes - found[OPTIMIZER].bytes == 4 * cost.parameters(GPT2, 50304)
    # norms 25 x 12; their backward passes 24 x 14 + 10; branches 24 x 2; GELU 12 x 4 x 10; embeddings 20.
    assert found[ELEMENTWISE].bytes == 1024 * 768 * (300 + 346 + 48 + 480 + 20)
