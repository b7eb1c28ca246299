"""torchao.float8, recipe rowwise, under torch.compile: a power-of-two scale a row."""

from te_bench.models.rivals import _torchao

RIVAL = _torchao.rival("rowwise", "rowwise_scaling")
