"""`te.attention.rope`: rotary embeddings, under the names of Transformer Engine's module."""

from te_bench.models.modules.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = ["RotaryPositionEmbedding", "apply_rotary_pos_emb"]
