"""te.LayerNormLinear, te.Linear and te.LayerNormMLP around the plain layer's attention: the quickstart's third step."""

import functools
from typing import Any

from torch import Tensor, nn

import te_bench.models as te
from te_bench.models.quickstart import Layer, LayerConfig, _te, named
from te_bench.models.quickstart.plain import Heads, attention_of, norm_of


class FusedLayer(nn.Module):
    """The plain layer's function; each norm is fused into the projection or MLP after it."""

    def __init__(self, p: LayerConfig):
        super().__init__()
        linear: dict[str, Any] = {"bias": p.bias, "params_dtype": p.dtype}
        normed: dict[str, Any] = {**linear, "eps": p.eps, "normalization": p.norm}
        self.ln_qkv = te.LayerNormLinear(p.hidden, sum(p.columns), **normed)
        self.heads = Heads(p, functools.partial(norm_of(p, te), params_dtype=p.dtype))
        self.attention = attention_of(p)
        self.projection = te.Linear(p.columns[0], p.hidden, **linear)
        self.dropout = nn.Dropout(p.dropout)
        self.ln_mlp = te.LayerNormMLP(p.hidden, p.ffn, activation=p.activation, **normed)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(*self.heads(self.ln_qkv(x)))
        x = x + self.dropout(self.projection(attended))
        return x + self.ln_mlp(x)


NAMES = named(
    {
        "ln1": "ln_qkv.layer_norm_",
        "qkv_projection": "ln_qkv.",
        "projection": "projection.",
        "ln2": "ln_mlp.layer_norm_",
        "mlp.linear1": "ln_mlp.fc1_",
        "mlp.linear2": "ln_mlp.fc2_",
    }
)

LAYER = Layer(build=FusedLayer, unsupported=_te.unsupported, context=_te.context, names=NAMES, numerics=True)
