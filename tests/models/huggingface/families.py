"""Small random models of transformers, a family a function, and a training pass of each."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCAB, LENGTH = 64, 16
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = {**SIZES, "num_key_value_heads": 2, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
T5 = {
    **{"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0},
    **{"vocab_size": VOCAB, "decoder_start_token_id": 0},
}
WHISPER = {
    **{f"{side}_{size}": n for side in ("encoder", "decoder") for size, n in (("layers", 2), ("attention_heads", 2))},
    **{f"{token}_token_id": 0 for token in ("pad", "bos", "eos", "decoder_start")},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "num_mel_bins": 16, "vocab_size": VOCAB},
    **{"max_source_positions": 20, "max_target_positions": 32},
}
#: family -> the names of its model's class and its configuration's, and what the latter is given.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GQA),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GQA, "sliding_window": 6}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GQA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GQA, "head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GQA, "pad_token_id": 0, "partial_rotary_factor": 0.5}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GQA, "num_local_experts": 4}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GQA, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GQA, "head_dim": 16}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": VOCAB, "n_positions": 32, "bos_token_id": 1,
         "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {**SIZES, "vocab_size": VOCAB, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "feed_forward_proj": "gated-gelu"}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 16}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
}  # fmt: skip


def make(family: str, seed: int = 0, **options: Any) -> Any:
    """The model in training, with weights large enough that every layer shows in the loss."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    model, config, settings = FAMILIES[family]
    made = getattr(transformers, model)(getattr(transformers, config)(**{**settings, **options}))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
            else:
                p.copy_(torch.randn_like(p) * p[0].numel() ** -0.5)
            if name.endswith(".q.weight"):
                p.mul_(0.25)  # T5 leaves attention unscaled: saturated, it makes any error large
    return made.train()


def draw(*sizes: int, seed: int = 1) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def tokens(batch: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def inputs(family: str) -> dict[str, Tensor]:
    if family == "vit":
        return {"pixel_values": draw(8, 3, 32, 32), "labels": torch.arange(8)}
    if family == "whisper":
        return {"input_features": draw(3, 16, 40), "labels": tokens()}
    return {"input_ids": tokens(), "labels": tokens().flip(1)}


def run(model: nn.Module, given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients by name, those of what was a Conv1D transposed back."""
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            layer = model.get_submodule(name.rpartition(".")[0])
            was_conv1d = ".c_" in name and not type(layer).__module__.startswith("transformers.") and p.dim() == 2
            found[name] = (p.grad.t() if was_conv1d else p.grad).clone()
    return loss.detach(), found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], error: float) -> None:
    """Each gradient within `error` of the largest element of its like; those that are 0 but for rounding within 1e-6."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max().item()
        assert difference <= error * gradient.abs().max().item() + 1e-6, f"{name}: {difference}"
