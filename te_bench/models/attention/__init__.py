"""`te.attention`: the attention modules, under the names of Transformer Engine's package."""

from te_bench.models.modules.attention import DotProductAttention, MultiheadAttention
from te_bench.models.modules.rotary import RotaryPositionEmbedding

__all__ = ["DotProductAttention", "MultiheadAttention", "RotaryPositionEmbedding"]
