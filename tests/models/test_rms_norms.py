"""Norms of transformers that te.convert takes for RMSNorms, by what they compute."""

import importlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

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


def test_a_norm_is_known_whatever_torch_s_default_dtype_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = make("llama", "LlamaRMSNorm")
        te.convert(model)
    finally:
        torch.set_default_dtype(before)
    assert isinstance(model[0], te.RMSNorm)  # type: ignore[index]


def test_a_norm_of_fake_tensors_stays_and_nothing_is_raised() -> None:
    with FakeTensorMode():
        report = te.convert(make("llama", "LlamaRMSNorm"))
    assert [kept.reason for kept in report.kept] == ["its weight is a FakeTensor"]


def test_what_is_called_an_rms_norm_and_stays_has_a_reason() -> None:
    without_eps = make("llama", "LlamaRMSNorm")
    without_eps[0].variance_epsilon = 0.0  # type: ignore[index]
    doubled = type("DoubledRMSNorm", (type(without_eps[0]),), {"forward": lambda self, x: 2 * x})  # type: ignore[index]
    doubled.__module__ = without_eps[0].__module__  # type: ignore[index]
    for model, reason in (
        (without_eps, "its eps is 0.0: te's must be a number greater than 0"),
        (nn.Sequential(doubled(32)), "it does not compute weight x / sqrt(mean(x^2) + eps)"),
    ):
        report = te.convert(model)
        assert not report.converted
        assert [kept.reason for kept in report.kept] == [reason]


def test_modules_of_torchscript_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 32), torch.jit.script(nn.ReLU()))
    assert [layer.name for layer in te.convert(model).converted] == ["0"]
