"""Blocks by Transformer Engine's TransformerLayer, and the last norm by its RMSNorm.

Its users write a Llama so; embedding, head and loss stay PyTorch's, in bf16. Weights are in float32 under autocast, as
te-bench trains them, and lie as TransformerLayer reads what is not interleaved: all of q, of k, of v; gate before up.
Each pass gives them to the layers anew, as they are then: an optimizer may have put copies in their place.

Source: Transformer Engine 2.20.2, pytorch/transformer.py, attention/multi_head_attention.py and
module/layernorm_mlp.py; its docs/examples/te_llama.
"""

import functools
from typing import TYPE_CHECKING, Any

from te_bench.models.configs import DecoderConfig
from te_bench.models.peers import transformer_engine
from te_bench.models.rivals import Capability, Rival, _parts

if TYPE_CHECKING:
    from torch import Tensor

    from te_bench.models.decoder import Decoder
    from te_bench.models.parts import AttentionPart, MLPPart


def rival(recipe: str, least: tuple[int, int] = (8, 9)) -> Rival:
    """Training under one of its recipes, with the default settings, from the compute capability `least` on."""

    def unsupported(config: DecoderConfig, device: str, capability: Capability) -> str | None:
        if reason := transformer_engine.lacks(device):
            return reason
        if capability is None or capability < least:
            return f"needs an NVIDIA GPU of compute capability {least[0]}.{least[1]} or newer"
        return _parts.unlike_llama(config)

    def build(model: "Decoder") -> None:
        from transformer_engine.pytorch import RMSNorm

        from te_bench.models.decoder import Passes
        from te_bench.models.parts import NormPart

        last = NormPart.of(model.tables().norm)
        norm = RMSNorm(len(last.weight), eps=last.norm.eps, device="meta")
        layers = [_layer(*block) for block in _blocks(model)]
        model.passes = Passes(functools.partial(body, layers, norm), transformer_engine.autocast_of(recipe, {}))

    return Rival(
        title="Transformer Engine",
        packages=("transformer_engine",),
        unsupported=unsupported,
        build=build,
        recipe=recipe,
        modes=("eager", "cudagraph"),
        way="transformer_engine",
        ranks={"ddp": ("eager",)},
        own_blocks=True,
        own_attention=True,
        kernels=r"rmsnorm_fwd_(tuned|general)_kernel",
    )


def body(layers: list[Any], norm: Any, model: "Decoder", x: "Tensor") -> "Tensor":
    """Decoder.body, (B, T, C) -> (B, T, C), by layers that take the model's parameters."""
    angles = model.angles(x.shape[1])
    assert angles is not None, "unsupported refuses learned positions"
    turns = angles[:, None, None]  # (T, 1, 1, D), whatever the layers' format
    for layer, (attention, mlp) in zip(layers, _blocks(model), strict=True):
        theirs = layer.self_attention
        theirs.layernorm_qkv._parameters |= {"layer_norm_weight": attention.norm.weight, "weight": attention.qkv.weight}
        theirs.proj._parameters["weight"] = attention.proj.weight
        for own, part in ((theirs.q_norm, attention.q_norm), (theirs.k_norm, attention.k_norm)):
            if part is not None:
                own._parameters["weight"] = part.weight
        weights = {"layer_norm": mlp.norm.weight, "fc1": mlp.up.weight, "fc2": mlp.down.weight}
        layer.layernorm_mlp._parameters |= {f"{name}_weight": weight for name, weight in weights.items()}
        x = layer(x, rotary_pos_emb=turns)
    norm._parameters["weight"] = model.tables().norm.weight
    y: Tensor = norm(x)
    return y


def _blocks(model: "Decoder") -> "list[tuple[AttentionPart, MLPPart]]":
    parts: Any = model.parts()
    return list(zip(parts[::2], parts[1::2], strict=True))


def _layer(attention: "AttentionPart", mlp: "MLPPart") -> Any:
    """A layer without memory: its parameters are the model's."""
    from transformer_engine.pytorch import TransformerLayer

    qk: dict[str, Any] = {}
    if attention.q_norm is not None:
        qk = {"qk_norm_type": "RMSNorm", "qk_norm_eps": attention.q_norm.norm.eps, "qk_norm_before_rope": True}
    return TransformerLayer(
        *mlp.down.weight.shape,
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
        attn_input_format="bshd",
        device="meta",
        **qk,
    )
