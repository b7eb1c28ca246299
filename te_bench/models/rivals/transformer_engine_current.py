"""Transformer Engine's TransformerLayer under its Float8CurrentScaling: a scale a tensor, E5M2 for gradients."""

from te_bench.models.rivals import _transformer_engine

RIVAL = _transformer_engine.rival("float8_current_scaling")
