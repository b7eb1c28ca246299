"""The plain_sdpa layer with its Linears converted by torchao.float8."""

from torch import nn

from te_bench.models.peers import torchao
from te_bench.models.quickstart import Layer, LayerConfig, plain_sdpa


def layer(theirs: str, ours: str) -> Layer:
    """Make a rival of torchao's recipe `theirs`, whose arithmetic is te_bench's recipe `ours`."""

    def unsupported(p: LayerConfig) -> str | None:
        if p.recipe != ours:
            return f"recipe {p.recipe}: this conversion is {ours}"
        if p.settings:
            return f"{', '.join(p.settings)}: torchao's recipe has no such setting"
        reason = torchao.lacks(p.device, p.capability)
        return reason or ("attention manual: choose a kernel" if p.attention == "manual" else None)

    def build(p: LayerConfig) -> nn.Module:
        return torchao.convert(plain_sdpa.LAYER.build(p), theirs)

    return Layer(build=build, unsupported=unsupported)
