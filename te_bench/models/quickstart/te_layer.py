"""te.TransformerLayer: the quickstart's fourth step and, with a recipe, its fifth; of its parts te.LayerNormMLP."""

from typing import Any

from torch import Tensor, nn

import te_bench.models as te
from te_bench.models.quickstart import PARTS, Layer, LayerConfig, _te, named


class Alone(nn.Module):
    """A LayerNormMLP by its name in the layer."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.layernorm_mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layernorm_mlp(x)
        return y


def make(library: Any, p: LayerConfig, **options: Any) -> nn.Module:
    """The layer, or its MLP alone, of a library that reads like Transformer Engine."""
    if p.part == "mlp":
        return Alone(library.LayerNormMLP(p.hidden, p.ffn, params_dtype=p.dtype, **options))
    # One QKV weight, its rows by head as the plain layer has them.
    layer: nn.Module = library.TransformerLayer(
        p.hidden,
        p.ffn,
        p.heads,
        hidden_dropout=p.dropout,
        attention_dropout=p.dropout,
        self_attn_mask_type="causal" if p.causal else "no_mask",
        fuse_qkv_params=True,
        params_dtype=p.dtype,
        **options,
    )
    return layer


def build(p: LayerConfig) -> nn.Module:
    return make(te, p)


#: Transformer Engine's parameter names, which are te_bench's too.
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

LAYER = Layer(build=build, unsupported=_te.unsupported, context=_te.context, names=NAMES, numerics=True, parts=PARTS)
