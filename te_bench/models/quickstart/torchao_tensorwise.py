"""The plain_sdpa layer converted by torchao.float8, recipe tensorwise: a scale a tensor, E5M2 for gradients."""

from te_bench.models.quickstart import _torchao

LAYER = _torchao.layer("tensorwise", "float8_current_scaling")
