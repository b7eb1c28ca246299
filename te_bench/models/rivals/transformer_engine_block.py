"""Transformer Engine's TransformerLayer under its Float8BlockScaling: a scale a block, E4M3 for all."""

from te_bench.models.rivals import _transformer_engine

RIVAL = _transformer_engine.rival("float8_block_scaling", least=(9, 0))
