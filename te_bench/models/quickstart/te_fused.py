"""te.LayerNormLinear, te.Linear and te.LayerNormMLP around the plain layer's attention: the quickstart's third step."""

from torch import Tensor, nn

import te_bench.models as te
from te_bench.models.quickstart import Layer, LayerConfig, _te
from te_bench.models.quickstart.plain import EPS, attention_of, split_heads


class FusedLayer(nn.Module):
    """The plain layer's function; the norms are part of the projection and of the MLP that follow them."""

    def __init__(self, p: LayerConfig):
        super().__init__()
        self.heads = p.heads
        self.ln_qkv = te.LayerNormLinear(p.hidden, 3 * p.hidden, eps=EPS, params_dtype=p.dtype)
        self.attention = attention_of(p)
        self.projection = te.Linear(p.hidden, p.hidden, params_dtype=p.dtype)
        self.dropout = nn.Dropout(p.dropout)
        self.ln_mlp = te.LayerNormMLP(p.hidden, p.ffn, eps=EPS, params_dtype=p.dtype)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(*split_heads(self.ln_qkv(x), self.heads))
        x = x + self.dropout(self.projection(attended))
        return x + self.ln_mlp(x)


NAMES = {
    "ln1.weight": "ln_qkv.layer_norm_weight",
    "ln1.bias": "ln_qkv.layer_norm_bias",
    "qkv_projection.weight": "ln_qkv.weight",
    "qkv_projection.bias": "ln_qkv.bias",
    "ln2.weight": "ln_mlp.layer_norm_weight",
    "ln2.bias": "ln_mlp.layer_norm_bias",
    "mlp.linear1.weight": "ln_mlp.fc1_weight",
    "mlp.linear1.bias": "ln_mlp.fc1_bias",
    "mlp.linear2.weight": "ln_mlp.fc2_weight",
    "mlp.linear2.bias": "ln_mlp.fc2_bias",
}

LAYER = Layer(build=FusedLayer, unsupported=_te.unsupported, context=_te.context, names=NAMES, numerics=True)
