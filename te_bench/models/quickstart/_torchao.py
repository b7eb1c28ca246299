"""The plain_sdpa layer with its Linears converted by torchao.float8."""

from torch import nn

from te_bench.models import torchao_linears
from te_bench.models.quickstart import LayerConfig, plain_sdpa


def unsupported(p: LayerConfig, name: str) -> str | None:
    """Why not; `name` is one of torchao_linears.NAMES."""
    recipe = torchao_linears.NAMES[name][1]
    if p.recipe != recipe:
        return f"recipe {p.recipe}: this conversion is {recipe}"
    if p.settings:
        return f"{', '.join(p.settings)}: torchao's recipe has no such setting"
    reason = torchao_linears.unsupported(p.device, p.capability)
    return reason or ("attention manual: choose a kernel" if p.attention == "manual" else None)


def build(p: LayerConfig, name: str) -> nn.Module:
    return torchao_linears.convert(plain_sdpa.LAYER.build(p), name)
