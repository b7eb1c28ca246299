"""Llama 2 and 3, Mistral, Qwen 2 and Qwen 3 as transformers reads and writes them.

A Mistral without a sliding window is a Llama, and is written as one. Query, key and value are three tensors there, gate and
up two; the features of a head have the same order.
Source: transformers, models/{llama,mistral,qwen2,qwen3} and modeling_rope_utils.py.
"""

import dataclasses
import re
from typing import Any

from te_bench.models.configs import DecoderConfig, LlamaConfig, RopeScaling
from te_bench.training.layouts import Layout, Piece, Settings, read_sizes, require

#: transformers' defaults for settings that a config.json omits.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
#: Settings that define another model unless they have Llama's value, given here.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
GATE_UP = ("gate_proj", "up_proj")
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _read(found: Settings) -> LlamaConfig:
    kind = found["model_type"]
    found = {**DEFAULTS[kind], **found}
    _require_bias_of_qkv_alone(found)
    require(found, FIXED)
    sizes = ("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers")
    vocab, length, width, ffn, layers = read_sizes(found, *sizes)
    [heads] = read_sizes(found, "num_attention_heads")
    inferred = {"num_key_value_heads": heads, "head_dim": width // heads}
    groups, head_dim = read_sizes(
        {key: value if found.get(key) is None else found[key] for key, value in inferred.items()}, *inferred
    )
    _require_no_window(found, length)
    theta, scaling = _read_rotary(found)
    tied = found.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings is {tied!r}; give true or false")
    return LlamaConfig(
        vocab_size=vocab,
        block_size=length,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=found.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=tied,
        attention_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def _require_bias_of_qkv_alone(found: Settings) -> None:
    if found["model_type"] in ("llama", "qwen3") and found.get("attention_bias"):
        raise ValueError("attention_bias is True: a bias of o_proj, too, which te-bench's Llama has not")


def _require_no_window(found: Settings, length: int) -> None:
    """Raise ValueError if some layer attends to less than the whole sequence."""
    window = found.get("sliding_window")
    if found["model_type"] != "mistral":
        kinds = found.get("layer_types") or ["sliding_attention"]
        if not isinstance(kinds, list):
            raise ValueError(f"layer_types is {kinds!r}; give a list")
        if not found.get("use_sliding_window") or "sliding_attention" not in kinds:
            return
    if window is not None and (type(window) is not int or window < length):
        raise ValueError(
            f"sliding_window is {window!r} of {length} positions: attention here sees the whole sequence; for shorter "
            "ones alone set max_position_embeddings to the window"
        )


def _read_rotary(found: Settings) -> tuple[float, RopeScaling | None]:
    """Return (rope_theta, scaling): in newer files both in rope_parameters, in older ones rope_theta, rope_scaling."""
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"the rotary settings are {rope!r}; give an object with rope_type")
    require(rope, {"partial_rotary_factor": 1.0})
    theta: Any = rope.get("rope_theta", found.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type"))
    if kind in (None, "default") and not any(isinstance(value, dict) for value in rope.values()):
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_type is {kind!r}, of {sorted(rope)}; known: default, llama3")
    if original := found.get("original_max_position_embeddings"):
        rope = {**rope, "original_max_position_embeddings": original}
    missing = [key for key in SCALING if key not in rope]
    if missing:
        raise ValueError(f"rope_type llama3 without {', '.join(missing)}")
    return theta, RopeScaling(**{key: rope[key] for key in SCALING})


def _describe(config: DecoderConfig) -> dict[str, Any]:
    assert isinstance(config, LlamaConfig)
    if config.attention_bias and config.qk_norm:
        raise ValueError("attention_bias with qk_norm: no model of transformers has both; leave one out")
    kind = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"
    if kind == "llama" and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size {config.hidden_size} is no multiple of num_attention_heads {config.num_attention_heads}, as "
            "transformers asks of a Llama; a Qwen 3, with qk_norm, may have such heads"
        )
    scaling = config.rope_scaling
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling and {"rope_type": "llama3", **dataclasses.asdict(scaling)},
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _pieces(config: DecoderConfig, name: str) -> list[Piece]:
    shape = config.shape
    q, kv = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    fused = {"qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv}, "gate_up_proj": dict.fromkeys(GATE_UP, shape.ffn)}
    module, _, end = name.rpartition(".")
    above, _, module = module.rpartition(".")
    if module not in fused:
        return [Piece(name)]
    return [Piece(f"{above}.{part}.{end}", rows) for part, rows in fused[module].items()]


LAYOUT = Layout(
    model_types=tuple(DEFAULTS),
    prefix="model.",
    ignored=re.compile(r"\.rotary_emb\.inv_freq$"),  # older files have them
    read=_read,
    describe=_describe,
    pieces=_pieces,
)
