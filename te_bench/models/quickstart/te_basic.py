"""The plain layer with te.Linear and te.LayerNorm: the quickstart's second step."""

import functools

from torch import nn

import te_bench.models as te
from te_bench.models.quickstart import Layer, LayerConfig, _te
from te_bench.models.quickstart.plain import PlainLayer, norm_of


def build(p: LayerConfig) -> nn.Module:
    linear = functools.partial(te.Linear, params_dtype=p.dtype)
    norm = functools.partial(norm_of(p, te), params_dtype=p.dtype)
    return PlainLayer(p, linear=linear, norm=norm)


LAYER = Layer(build=build, unsupported=_te.unsupported, context=_te.context, numerics=True)
