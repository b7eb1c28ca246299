"""The plain_sdpa layer converted by torchao.float8, recipe rowwise: a power-of-two scale a row."""

import functools

from te_bench.models.quickstart import Layer, _torchao

LAYER = Layer(
    build=functools.partial(_torchao.build, name="torchao_rowwise"),
    unsupported=functools.partial(_torchao.unsupported, name="torchao_rowwise"),
)
