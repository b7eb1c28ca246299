"""Norms of transformers that te.convert takes for RMSNorms, by what they compute."""

import importlib

import pytest
import torch
from torch import nn

import te_bench.models as te

pytest.importorskip("transformers")

#: {family's folder: norm's class}
PLAIN = {
    "llama": "LlamaRMSNorm", "mistral": "MistralRMSNorm", "mixtral": "MixtralRMSNorm", "phi3": "Phi3RMSNorm",
    "qwen2": "Qwen2RMSNorm", "qwen2_moe": "Qwen2MoeRMSNorm", "qwen3": "Qwen3RMSNorm", "qwen3_moe": "Qwen3MoeRMSNorm",
    "mamba": "MambaRMSNorm", "t5": "T5LayerNorm", "granite": "GraniteRMSNorm", "olmo2": "Olmo2RMSNorm",
    "deepseek_v3": "DeepseekV3RMSNorm", "gpt_oss": "GptOssRMSNorm", "smollm3": "SmolLM3RMSNorm",
}  # fmt: skip
CENTRED = {
    "gemma": "GemmaRMSNorm",
    "gemma2": "Gemma2RMSNorm",
    "gemma3": "Gemma3RMSNorm",
    "qwen3_next": "Qwen3NextRMSNorm",
}
#: A gate beside x, no weight, a mean taken away.
OTHERS = {"qwen3_next": "Qwen3NextRMSNormGated", "llama4": "Llama4TextL2Norm", "cohere": "CohereLayerNorm"}


def make(family: str, name: str) -> nn.Module:
    norm: nn.Module = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)(32)
    for p in norm.parameters():
        nn.init.normal_(p)
    return nn.Sequential(norm)


@pytest.mark.parametrize(("family", "name"), (PLAIN | CENTRED).items())
@pytest.mark.parametrize("scale", [1e-3, 1.0])  # at the small one eps shows
def test_what_computes_an_rms_norm_is_one(family: str, name: str, scale: float) -> None:
    model = make(family, name)
    weight = model[0].weight  # type: ignore[index]
    x = torch.randn(5, 32) * scale
    expected = model(x)
    report = te.convert(model)
    assert isinstance(model[0], te.RMSNorm)  # type: ignore[index]
    assert model[0].weight is weight
    assert model[0].zero_centered_gamma is (family in CENTRED)
    assert report.converted[0].parameters == 0
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(("family", "name"), OTHERS.items())
def test_what_computes_otherwise_stays(family: str, name: str) -> None:
    model = make(family, name)
    assert not te.convert(model).converted
    assert type(model[0]).__name__ == name  # type: ignore[index]
