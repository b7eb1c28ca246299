"""Transformer Engine's recipes, its autocast, and its layers in place of a Llama's blocks.

A block's weights lie as its TransformerLayer reads them without interleaving: all of q, of k, of v; gate before up.

Source: Transformer Engine 2.20.2, pytorch/quantization.py, common/recipe/__init__.py, pytorch/transformer.py,
attention/multi_head_attention.py and module/layernorm_mlp.py.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from te_bench.models.rivals import missing

if TYPE_CHECKING:
    from torch import Tensor

    from te_bench.models.decoder import Decoder
    from te_bench.models.parts import AttentionPart, MLPPart

#: {te_bench's recipe: Transformer Engine's with the same arithmetic}.
RECIPES = {
    "delayed_scaling": "DelayedScaling",
    "float8_current_scaling": "Float8CurrentScaling",
    "float8_block_scaling": "Float8BlockScaling",
}
MODULES = ("transformer_engine", "transformer_engine_torch")  # pure Python, and its extension
INSTALL = "--no-build-isolation 'transformer_engine[pytorch]'"


def lacks(device: str) -> str | None:
    """Return why it cannot run on a device of that type, or None."""
    if reason := missing(MODULES, "transformer_engine", INSTALL):
        return reason
    return None if device == "cuda" else "needs an NVIDIA GPU: Transformer Engine does not run on a CPU"


def autocast_of(recipe: str, settings: Mapping[str, Any]) -> Callable[..., AbstractContextManager[Any]]:
    """Return its autocast for one of RECIPES with these settings; called per forward pass with whether FP8 is on."""
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch import autocast

    return functools.partial(autocast, recipe=getattr(recipes, RECIPES[recipe])(**settings))


def layers(model: "Decoder", **over: Any) -> list[Any]:
    """Make a TransformerLayer for each block, without memory: `give` sets the block's parameters.

    over: arguments that divide it over ranks, whose shares of the model's parameters exist by then.
    """
    from transformer_engine.pytorch import TransformerLayer

    found = []
    for attention, mlp in blocks(model):
        options: dict[str, Any] = {"attn_input_format": "bshd", **over}
        if attention.q_norm is not None:
            norm_of_heads = {"qk_norm_type": "RMSNorm", "qk_norm_eps": attention.q_norm.norm.eps}
            options |= {**norm_of_heads, "qk_norm_before_rope": True}
        hidden, features = mlp.down.weight.shape
        layer = TransformerLayer(
            hidden,
            features * over.get("tp_size", 1),
            attention.heads,
            num_gqa_groups=attention.groups,
            kv_channels=attention.head_dim,
            layernorm_epsilon=attention.norm.norm.eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="causal",
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            device="meta",
            **options,
        )
        found.append(layer)
    return found


def last_norm(model: "Decoder") -> Any:
    """Make its RMSNorm for the model's last norm, without memory."""
    from transformer_engine.pytorch import RMSNorm

    from te_bench.models.parts import NormPart

    last = NormPart.of(model.tables().norm)
    return RMSNorm(len(last.weight), eps=last.norm.eps, device="meta")


def blocks(model: "Decoder") -> "list[tuple[AttentionPart, MLPPart]]":
    parts: Any = model.parts()
    return list(zip(parts[::2], parts[1::2], strict=True))


def give(layer: Any, attention: "AttentionPart", mlp: "MLPPart") -> None:
    """Make a TransformerLayer compute with a block's current parameters."""
    theirs = layer.self_attention
    theirs.layernorm_qkv._parameters |= {"layer_norm_weight": attention.norm.weight, "weight": attention.qkv.weight}
    theirs.proj._parameters["weight"] = attention.proj.weight
    for own, part in ((theirs.q_norm, attention.q_norm), (theirs.k_norm, attention.k_norm)):
        if part is not None:
            own._parameters["weight"] = part.weight
    weights = {"layer_norm": mlp.norm.weight, "fc1": mlp.up.weight, "fc2": mlp.down.weight}
    layer.layernorm_mlp._parameters |= {f"{name}_weight": weight for name, weight in weights.items()}


def body(layers: list[Any], norm: Any, model: "Decoder", x: "Tensor", *, dim: int = 1) -> "Tensor":
    """Compute Decoder.body by layers that are given the model's current parameters. dim: as in `through`."""
    for layer, block in zip(layers, blocks(model), strict=True):
        give(layer, *block)
    return through(layers, norm, model, x, dim=dim)


def through(layers: list[Any], norm: Any, model: "Decoder", x: "Tensor", *, dim: int = 1) -> "Tensor":
    """Pass x through layers that have their parameters, and the last norm, which gets its own. dim: T's dimension."""
    angles = model.angles(x.shape[dim])
    assert angles is not None, "unsupported refuses learned positions"
    turns = angles[:, None, None]  # (T, 1, 1, D), whatever the layers' format
    for layer in layers:
        x = layer(x, rotary_pos_emb=turns)
    norm._parameters["weight"] = model.tables().norm.weight
    y: Tensor = norm(x)
    return y
