"""The Llama: written out in numbers, its angles, grouped queries, padding, initialisation, counts, bad input."""

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.models import decoder
from te_bench.models.configs import DecoderConfig, GPTConfig
from te_bench.models.zoo.llama import CONFIGS, Llama, LlamaConfig, RopeScaling
from te_bench.training import weights

SMALL = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # not 32 / 4
    block_size=24,
    vocab_size=50,
    rope_theta=1000.0,
    rms_norm_eps=1e-3,
)
SCALED = RopeScaling(factor=8.0, original_max_position_embeddings=64)
RICH: dict[str, Any] = {"qk_norm": True, "attention_bias": True, "rope_scaling": SCALED}


def a_model(padded: int | None = None, *, seed: int = 0, attention: str = "manual", **changes: Any) -> Llama:
    torch.manual_seed(seed)
    return Llama(dataclasses.replace(SMALL, **changes), attention=attention, padded_vocab_size=padded)


@torch.no_grad()
def shaken(model: Llama) -> Llama:
    for p in model.parameters():
        p += torch.randn_like(p) * 0.1
    return model


def a_batch(batch: int = 4, length: int = 24) -> tuple[Tensor, Tensor]:
    both = torch.randint(0, 50, (2, batch, length), generator=torch.Generator().manual_seed(1))
    return both[0], both[1]


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if isinstance(config, LlamaConfig)])
def test_frequencies_have_the_same_bits_on_every_cpu(name: str) -> None:
    """The power, nearest in float32, under 1: float32 powers of AVX and of none differ in qwen3-0.6b's."""
    small: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    config = dataclasses.replace(CONFIGS[name], block_size=2, rope_scaling=None, **small)
    powers = [config.rope_theta ** (i / config.head_dim) for i in range(0, config.head_dim, 2)]
    expected = (np.float32(1) / np.array(powers, np.float32)).tolist()
    assert Llama(config, attention="manual").rotary[1].tolist() == [*expected, *expected]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("changes", [{}, RICH], ids=["plain", "rich"])
def test_the_model_written_out_in_numbers(changes: dict[str, Any], tied: bool) -> None:
    """The forward pass again, in functions of one tensor, from the papers."""
    model = shaken(a_model(**changes, tie_word_embeddings=tied).double())
    w = {name.removeprefix("model."): p.detach() for name, p in model.named_parameters()}
    tokens, targets = a_batch(2, 10)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., :8], x[..., 8:])
        frequencies = [1000 ** (-i / 8) for i in range(8)]
        if changes:
            for i, f in enumerate(frequencies):
                fits = 64 * f / (2 * math.pi)  # of the wave into the pretraining's context
                share = min(max((fits - 1) / 3, 0), 1)
                frequencies[i] = f * share + f / 8 * (1 - share)
        angles = torch.arange(10, dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    x = w["embed_tokens.weight"][tokens]
    for i in range(2):
        at = f"layers.{i}"
        qkv = norm(x, f"{at}.input_layernorm") @ w[f"{at}.self_attn.qkv_proj.weight"].t()
        qkv = qkv + w.get(f"{at}.self_attn.qkv_proj.bias", 0)
        q, k, v = (part.unflatten(-1, (-1, 16)) for part in qkv.split([64, 32, 32], -1))
        if changes:
            q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
        heads = []
        for h in range(4):
            scores = turn(q[:, :, h]) @ turn(k[:, :, h // 2]).transpose(1, 2) / 4
            scores += torch.full((10, 10), -math.inf, dtype=torch.float64).triu(1)
            heads.append(scores.exp() / scores.exp().sum(-1, keepdim=True) @ v[:, :, h // 2])
        x = x + torch.cat(heads, -1) @ w[f"{at}.self_attn.o_proj.weight"].t()
        gate, up = (norm(x, f"{at}.post_attention_layernorm") @ w[f"{at}.mlp.gate_up_proj.weight"].t()).chunk(2, -1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ w[f"{at}.mlp.down_proj.weight"].t()
    logits = norm(x, "norm") @ w["embed_tokens.weight" if tied else "lm_head.weight"].t()
    # The angles are float32's, as transformers has them.
    torch.testing.assert_close(model.logits(tokens), logits, rtol=1e-5, atol=1e-5)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), loss, rtol=1e-6, atol=1e-6)


# Angles.


def emptied(model: Llama) -> Llama:
    twin = weights.make_empty(model.config, attention="manual")
    twin.load_state_dict(model.state_dict())
    assert isinstance(twin, Llama)
    return twin


def loaded(model: Llama) -> Llama:
    with torch.device("meta"):
        twin = Llama(model.config, attention="manual")
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin


def in_another(model: Llama) -> Llama:
    with torch.device("meta"):
        inner = Llama(model.config, attention="manual")
    nn.ModuleList([inner]).to_empty(device="cpu")
    return inner


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: m.double(),
        lambda m: m.double().float(),
        lambda m: m.bfloat16(),
        lambda m: m.half().float(),
        lambda m: m.to_empty(device="cpu"),
        emptied,
        loaded,
        in_another,
    ],
    ids=[
        "deepcopy",
        "pickle",
        "double",
        "and back",
        "bf16",
        "half",
        "to_empty",
        "make_empty",
        "assign",
        "inside another",
    ],
)
def test_nothing_loses_the_angles(change: Callable[[Llama], Llama]) -> None:
    model = a_model(rope_scaling=SCALED)
    wanted = model.angles(24).clone()
    changed = change(model)
    assert changed.angles(24).dtype is (
        torch.float64 if changed.lm_head.weight.dtype is torch.float64 else torch.float32
    )
    assert torch.equal(changed.angles(24).float(), wanted)
    assert "rotary" not in changed.state_dict()


# Padding and the head.


@pytest.mark.parametrize("tied", [False, True])
def test_the_padded_model_is_the_unpadded_one(tied: bool) -> None:
    found = []
    for padded in (None, 64):
        model = a_model(padded, tie_word_embeddings=tied).double()
        loss = model(*a_batch())
        loss.backward()
        found.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    (loss, grads), (wide_loss, wide) = found
    assert wide_loss == pytest.approx(loss, rel=1e-14)
    assert list(grads) == list(wide)
    for name, gradient in wide.items():
        assert gradient is not None
        assert len(gradient) in (len(grads[name]), 64)
        assert (gradient[50:] == 0).all() or len(gradient) != 64 or "qkv" in name
        torch.testing.assert_close(gradient[: len(grads[name])], grads[name])


def test_the_head_is_the_embedding_where_it_is_tied() -> None:
    model = a_model(64, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert a_model().lm_head.weight is not a_model().model.embed_tokens.weight


# Initialisation and counts.


OF_GPT = GPTConfig(n_layer=3, n_head=4, n_embd=128, block_size=24, vocab_size=500, bias=True)
OF_LLAMA = dataclasses.replace(
    SMALL, num_hidden_layers=3, hidden_size=128, intermediate_size=192, vocab_size=500, **RICH
)


@pytest.mark.parametrize("config", [OF_GPT, OF_LLAMA])
def test_initialisation_is_gpt2s(config: DecoderConfig) -> None:
    torch.manual_seed(0)
    model = decoder.build(config, attention="manual", padded_vocab_size=512)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name or "ln_" in name:
            assert (p == 1).all(), name
        else:
            std = 0.02 / math.sqrt(6) if name.endswith(("c_proj.weight", "o_proj.weight", "down_proj.weight")) else 0.02
            values = p[:500] if model.has_padding(p) else p
            tolerance = 5 / math.sqrt(2 * values.numel())
            assert values.std().item() == pytest.approx(std, rel=tolerance), name
            assert abs(values.mean().item()) < 5 * std / math.sqrt(values.numel()), name
    assert model(*a_batch()).item() == pytest.approx(math.log(500), abs=0.1)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama3-1b", 1_235_814_400),
        ("llama3-3b", 3_212_749_824),
        ("llama3-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_parameters_of_the_published_models(name: str, published: int) -> None:
    """As safetensors of the Hugging Face Hub count them, and as the shape does without a model."""
    with torch.device("meta"):
        model = Llama(CONFIGS[name])
    count = sum(p.numel() for p in model.parameters())
    shape = CONFIGS[name].shape
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    assert count == tables + shape.layers * (shape.weights + shape.vectors) + shape.last_vectors == published


def test_a_layers_vectors_are_counted() -> None:
    model = a_model(**RICH)
    vectors = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 1)
    assert model.config.shape.vectors == vectors == 2 * 32 + 128 + 2 * 16


def test_flop_per_token() -> None:
    """Every multiplication of forward and backward; norms, rotations and embeddings are small."""
    with torch.device("meta"):
        model = Llama(CONFIGS["llama3-1b"], padded_vocab_size=128512)
    matrices = 16 * (2048 * 3072 + 2048 * 2048 + 3 * 2048 * 8192) + 2048 * 128256
    assert model.flop_per_token(8192) == pytest.approx(6 * (matrices + 16 * 2 * 8192 * 2048), rel=1e-4)


# What it sees, and bad input.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"dropout": 0.1}, r"dropout is 0\.1: a Llama has none"),
        ({"rope_theta": -1.0}, r"rope_theta is -1\.0: give a positive number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        a_model(**changes)


def test_a_scaling_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="factor is 0: give a positive number"):
        RopeScaling(factor=0)
    with pytest.raises(ValueError, match=r"high_freq_factor 1\.0 must be greater than low_freq_factor 2"):
        RopeScaling(factor=8.0, low_freq_factor=2, high_freq_factor=1.0)
