"""Models to plan for: all that te-bench knows by name, and larger ones, by their shapes alone."""

import dataclasses

from te_bench import plugins
from te_bench.models.configs import LLAMA_3, DecoderConfig, GPTConfig, LlamaConfig, configs

#: Shapes for planning only: config.json of meta-llama/Llama-3.1-70B and -405B, and llm-foundry's MPT, built like GPT-2
#: (mpt-1b.yaml, mpt-13b.yaml and mpt-70b.yaml of scripts/train/yamls/pretrain).
PLANNED: dict[str, DecoderConfig] = {
    "llama3-70b": LlamaConfig(  # 70.6 B
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, head_dim=128, **LLAMA_3,
    ),
    "llama3-405b": LlamaConfig(  # 405.9 B
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, head_dim=128,
        **LLAMA_3,
    ),
    "mpt-1b": GPTConfig(n_layer=24, n_head=16, n_embd=2048, block_size=2048, vocab_size=50368),  # 1.32 B
    "mpt-13b": GPTConfig(n_layer=40, n_head=40, n_embd=5120, block_size=2048, vocab_size=50368),  # 12.9 B
    "mpt-70b": GPTConfig(n_layer=80, n_head=64, n_embd=8192, block_size=2048, vocab_size=50368),  # 64.9 B
}  # fmt: skip


def known() -> dict[str, DecoderConfig]:
    """Return all configurations by name."""
    return {**PLANNED, **configs()}


def model(name: str, tokens: int | None = None) -> DecoderConfig:
    """Return a configuration by name, with sequences of `tokens` tokens. Raise ValueError for an unknown name."""
    found = known()
    plugins.check("model", name, sorted(found))
    return found[name] if tokens is None else dataclasses.replace(found[name], block_size=tokens)
