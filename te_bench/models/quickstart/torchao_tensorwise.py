"""The plain_sdpa layer converted by torchao.float8, recipe tensorwise: a scale a tensor, E5M2 for gradients."""

import functools

from te_bench.models.quickstart import Layer, _torchao

LAYER = Layer(
    build=functools.partial(_torchao.build, name="torchao_tensorwise"),
    unsupported=functools.partial(_torchao.unsupported, name="torchao_tensorwise"),
)
