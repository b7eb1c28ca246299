"""GPT-2 as OpenAI published it and transformers' GPT2LMHeadModel reads it.

Source: transformers, models/gpt2 (its Conv1D holds a Linear's weight transposed) and configuration_gpt2.py.
"""

import re
from typing import Any

from te_bench.models.configs import DecoderConfig, GPTConfig
from te_bench.training.layouts import Layout, Piece, Settings, read_sizes, require

#: Settings that define another model unless they have GPT-2's value, given here.
FIXED: dict[str, Any] = {
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "layer_norm_epsilon": 1e-5,  # torch.nn.LayerNorm's, and GPT-2's
}
#: activation_function -> torch's `approximate`; every name but "gelu" means the tanh form.
GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}
CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")


def _read(found: Settings) -> GPTConfig:
    require(found, {**FIXED, "quantization_config": None})
    sizes = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    vocab, positions, width, layers, heads = read_sizes(found, *sizes)
    if found.get("n_inner") not in (None, 4 * width):
        raise ValueError(f"n_inner is {found['n_inner']!r}; only 4 n_embd = {4 * width} can be loaded")
    activation = found.get("activation_function", "gelu_new")
    if activation not in list(GELU):
        raise ValueError(f"activation_function is {activation!r}; known: {', '.join(GELU)}")
    dropouts = [found.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    if not isinstance(dropouts[0], int | float) or dropouts != dropouts[:1] * 3:
        raise ValueError(f"resid_pdrop, embd_pdrop and attn_pdrop are {dropouts}; give them one number")
    return GPTConfig(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        block_size=positions,
        vocab_size=vocab,
        dropout=float(dropouts[0]),
        bias=True,
        gelu=GELU[activation],
    )


def _describe(config: DecoderConfig) -> dict[str, Any]:
    assert isinstance(config, GPTConfig)
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **FIXED,
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "activation_function": {"none": "gelu", "tanh": "gelu_new"}[config.gelu],
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def _zeros(config: DecoderConfig) -> dict[str, int]:
    """Return the sizes of the biases that transformers' GPT-2 always has and a model with bias=False lacks."""
    assert isinstance(config, GPTConfig)
    if config.bias:
        return {}
    c, found = config.n_embd, {"transformer.ln_f.bias": config.n_embd}
    of_a_block = {"ln_1": c, "attn.c_attn": 3 * c, "attn.c_proj": c, "ln_2": c, "mlp.c_fc": 4 * c, "mlp.c_proj": c}
    for layer in range(config.n_layer):
        found |= {f"transformer.h.{layer}.{name}.bias": size for name, size in of_a_block.items()}
    return found


LAYOUT = Layout(
    model_types=("gpt2",),
    prefix="transformer.",
    ignored=re.compile(r"\.attn\.(masked_)?bias$"),  # causal masks
    read=_read,
    describe=_describe,
    pieces=lambda config, name: [Piece(name, transposed=CONV1D.search(name) is not None)],
    zeros=_zeros,
)
