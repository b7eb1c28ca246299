"""The plain_sdpa layer converted by torchao.float8, recipe rowwise: a power-of-two scale a row."""

from te_bench.models.quickstart import _torchao

LAYER = _torchao.layer("rowwise", "rowwise_scaling")
