"""The layer of a model in `te-bench list models`: its parts besides its sizes, and its rotary angles."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from te_bench.models import decoder
from te_bench.models.configs import configs
from te_bench.models.decoder import Decoder
from te_bench.models.parts import AttentionPart, MLPPart

NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
ACTIVATIONS = ("gelu", "swiglu")  # those of plain.py


def _first(name: str, length: int) -> Decoder:
    """Build the model with one layer for sequences of `length`, on the meta device."""
    config = configs()[name]
    with torch.device("meta"):
        return decoder.build(dataclasses.replace(config, block_size=length, vocab_size=1, **{config.LAYERS: 1}))


def unlike(name: str) -> str | None:
    """Return why no rival can build this model's layer, or None."""
    model = _first(name, 1)
    parts, turned = model.parts(), model.angles(1)
    if tuple(map(type, parts)) != (AttentionPart, MLPPart):
        return "its layer is not an attention and then an MLP"
    attention: Any
    mlp: Any
    attention, mlp = parts
    if len({linear.bias is None for linear in (attention.qkv, attention.proj, mlp.up, mlp.down)}) > 1:
        return "of its Linears some have a bias and some have none"
    if any(part.norm.norm.kind == "layernorm" and part.norm.bias is None for part in parts):
        return "its LayerNorms have no bias, and Transformer Engine's have one"
    norms = [norm.norm for norm in (attention.norm, mlp.norm, attention.q_norm, attention.k_norm) if norm is not None]
    if len(set(norms)) > 1 or norms[0].zero_centered_gamma:
        return "its norms are of several kinds, or their gains are centred at zero"
    if turned is None or turned.shape[1] != attention.head_dim:
        return "its queries and keys do not turn, or not all of their features"
    if mlp.activation not in ACTIVATIONS:
        return f"its activation is {mlp.activation}, and the plain layer's {' or '.join(ACTIVATIONS)}"
    return None


def settings(name: str) -> dict[str, Any]:
    """Return the LayerConfig fields in which a model's layer (not `unlike`) differs from the quickstart's."""
    attention: Any
    mlp: Any
    attention, mlp = _first(name, 1).parts()
    return {
        "model": name,
        "groups": attention.groups,
        "head_dim": attention.head_dim,
        "by_head": attention.turns > 1,
        "norm": NORMS[attention.norm.norm.kind],
        "eps": attention.norm.norm.eps,
        "bias": attention.qkv.bias is not None,
        "activation": mlp.activation,
        "qk_norm": attention.q_norm is not None,
    }


def angles(name: str | None, length: int) -> Tensor | None:
    """Return the rotary angles, (length, head_dim) float32 on torch's default device; None for the quickstart."""
    if name is None:
        return None
    made = _first(name, length).to_empty(device="cpu").angles(length)  # memory of its weights is never touched
    return None if made is None else made.to(torch.get_default_device())
