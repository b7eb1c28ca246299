"""Transformer Engine's TransformerLayer under its DelayedScaling: a scale a tensor, of the steps before."""

from te_bench.models.rivals import _transformer_engine

RIVAL = _transformer_engine.rival("delayed_scaling")
