"""The plain_sdpa layer with its Linears converted by torchao.float8."""

from torch import nn

from te_bench.models import torchao_linears
from te_bench.models.quickstart import Layer, LayerConfig, plain_sdpa


def layer(name: str) -> Layer:
    """The rival of a name of torchao_linears.NAMES."""

    def unsupported(p: LayerConfig) -> str | None:
        recipe = torchao_linears.NAMES[name][1]
        if p.recipe != recipe:
            return f"recipe {p.recipe}: this conversion is {recipe}"
        if p.settings:
            return f"{', '.join(p.settings)}: torchao's recipe has no such setting"
        reason = torchao_linears.unsupported(p.device, p.capability)
        return reason or ("attention manual: choose a kernel" if p.attention == "manual" else None)

    def build(p: LayerConfig) -> nn.Module:
        return torchao_linears.convert(plain_sdpa.LAYER.build(p), name)

    return Layer(build=build, unsupported=unsupported)
