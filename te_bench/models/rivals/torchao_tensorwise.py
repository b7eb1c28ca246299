"""torchao.float8, recipe tensorwise, under torch.compile: a scale a tensor, E5M2 for gradients."""

from te_bench.models.rivals import _torchao

RIVAL = _torchao.rival("tensorwise", "float8_current_scaling")
