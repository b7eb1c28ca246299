"""Layouts of Hugging Face folders: published configurations are the presets, and a further family is one file."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_bench.models import decoder, zoo
from te_bench.models.configs import CONFIGS
from te_bench.training import layouts, weights

#: As meta-llama/Llama-3.2-1B, meta-llama/Llama-3.1-8B and Qwen/Qwen3-0.6B are published, but for tokens and versions.
LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3-1b": {
        **LLAMA_3, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "tie_word_embeddings": True,
    },
    "llama3-8b": {
        **LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_the_presets(name: str) -> None:
    """But for the longest sequence."""
    published = PUBLISHED[name]
    found = layouts.of_model_type(published["model_type"]).read(published)
    assert found.block_size == published["max_position_embeddings"]
    assert dataclasses.replace(found, block_size=8192) == CONFIGS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_description_is_read_as_the_configuration_that_it_is_of(name: str) -> None:
    config = CONFIGS[name]
    described = layouts.load(config.family).describe(config)
    again = layouts.of_model_type(described["model_type"]).read(described)
    assert again == (dataclasses.replace(config, bias=True) if config.family == "gpt" else config)  # type: ignore[call-arg]


SANDWICH = """
import re
from te_bench.models.zoo.sandwich import SandwichConfig
from te_bench.training.layouts import Layout, read_sizes

def read(found):
    width, slices, length, vocab = read_sizes(found, "width", "slices", "length", "vocab_size")
    return SandwichConfig(width=width, slices=slices, block_size=length, vocab_size=vocab)

def describe(config):
    sizes = {"width": config.width, "slices": config.slices, "length": config.block_size}
    return {"model_type": "sandwich", "vocab_size": config.vocab_size, **sizes}

LAYOUT = Layout(model_types=("sandwich",), prefix="slices.", ignored=re.compile("^$"), read=read, describe=describe)
"""


@pytest.fixture
def sandwich(tmp_path: Path) -> Iterator[None]:
    """A decoder that nobody has heard of and its layout, as if they lay in models/zoo and training/layouts."""
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts" / "sandwich.py").write_text(SANDWICH)
    homes = {zoo: Path(__file__).parents[1] / "models" / "zoo" / "third", layouts: tmp_path / "layouts"}
    for package, folder in homes.items():
        package.__path__.append(str(folder))
    yield
    for package, folder in homes.items():
        package.__path__.remove(str(folder))
        sys.modules.pop(f"{package.__name__}.sandwich", None)


@pytest.mark.usefixtures("sandwich")
@pytest.mark.parametrize("shard_bytes", [10**9, 100_000])
def test_a_further_family_is_one_file(tmp_path: Path, shard_bytes: int) -> None:
    model = decoder.load("sandwich", attention="manual", padded_vocab_size=320).eval()
    weights.save(model, tmp_path / "folder", shard_bytes=shard_bytes)
    again = weights.load(tmp_path / "folder", attention="manual").eval()
    assert again.config == model.config
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(again.logits(tokens), model.logits(tokens))
