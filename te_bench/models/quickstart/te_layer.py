"""te.TransformerLayer: the quickstart's fourth step and, with a recipe, its fifth; of its parts te.LayerNormMLP."""

from typing import Any

from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import decoder_layer
from te_bench.models.quickstart import PARTS, Layer, LayerConfig, _te, named


class Alone(nn.Module):
    """A LayerNormMLP under its name in the layer."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.layernorm_mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layernorm_mlp(x)
        return y


def make(library: Any, p: LayerConfig, **options: Any) -> nn.Module:
    """Make the layer, or its MLP alone, from a library with Transformer Engine's interface."""
    options |= {"params_dtype": p.dtype, "activation": p.activation, "normalization": p.norm, "bias": p.bias}
    if p.part == "mlp":
        return Alone(library.LayerNormMLP(p.hidden, p.ffn, eps=p.eps, **options))
    if p.qk_norm:  # older Transformer Engines lack it
        options |= {"qk_norm_type": p.norm, "qk_norm_eps": p.eps, "qk_norm_before_rope": True}
    # One QKV weight, with rows in the plain layer's order.
    layer: nn.Module = _turning(library, p)(
        p.hidden,
        p.ffn,
        p.heads,
        num_gqa_groups=p.groups,
        kv_channels=p.head_dim,
        layernorm_epsilon=p.eps,
        hidden_dropout=p.dropout,
        attention_dropout=p.dropout,
        self_attn_mask_type="causal" if p.causal else "no_mask",
        fuse_qkv_params=True,
        qkv_weight_interleaved=p.by_head,
        **options,
    )
    return layer


def _turning(library: Any, p: LayerConfig) -> Any:
    """Return the library's TransformerLayer, with a forward that takes x alone even if p has angles."""
    angles = decoder_layer.angles(p.model, p.sequence)
    if angles is None:
        return library.TransformerLayer
    rotary = angles[:, None, None]

    class Turning(library.TransformerLayer):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x, rotary_pos_emb=rotary)
            return y

    return Turning


def build(p: LayerConfig) -> nn.Module:
    return make(te, p)


#: {plain.py's parameter: Transformer Engine's and te_bench's name}; first the quickstart layer's.
NAMES = named(
    {
        "ln1": "self_attention.layernorm_qkv.layer_norm_",
        "qkv_projection": "self_attention.layernorm_qkv.",
        "projection": "self_attention.proj.",
        "ln2": "layernorm_mlp.layer_norm_",
        "mlp.linear1": "layernorm_mlp.fc1_",
        "mlp.linear2": "layernorm_mlp.fc2_",
    }
)
WITH_NORMS_OF_HEADS = NAMES | named({f"heads.{part}_norm": f"self_attention.{part}_norm." for part in "qk"})

LAYER = Layer(
    build=build, unsupported=_te.unsupported, context=_te.context, names=WITH_NORMS_OF_HEADS, numerics=True, parts=PARTS
)
