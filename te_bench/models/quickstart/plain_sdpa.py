"""The plain layer with one attention kernel pinned in place of the written-out attention."""

from te_bench.models.quickstart import Layer, LayerConfig
from te_bench.models.quickstart.plain import build, no_fp8


def unsupported(p: LayerConfig) -> str | None:
    if p.attention == "manual":
        return "attention manual: plain_sdpa calls a kernel; plain writes attention out"
    return no_fp8(p)


LAYER = Layer(build=build, unsupported=unsupported)
