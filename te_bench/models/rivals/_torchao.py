"""A rival with all Linears but the head by torchao.float8, under torch.compile; a user's model block by block, too."""

from typing import TYPE_CHECKING

from te_bench.models.configs import DecoderConfig
from te_bench.models.peers import torchao
from te_bench.models.rivals import Adoption, Capability, Changed, Rival

if TYPE_CHECKING:
    from torch import nn

    from te_bench.models.decoder import Decoder


def rival(theirs: str, ours: str) -> Rival:
    """Make the rival of torchao's recipe `theirs`, whose arithmetic is te_bench's `ours`; the head stays in bf16."""

    def unsupported(config: DecoderConfig, device: str, capability: Capability) -> str | None:
        return torchao.lacks(device, capability)

    def build(model: "Decoder") -> None:
        torchao.convert(model, theirs, leave=(model.head_name,))

    def adopt(module: "nn.Module") -> Changed:
        return Changed(linears=torchao.adopt(module, theirs), multiple=torchao.MULTIPLE)

    return Rival(
        title="torchao",
        packages=("torchao",),
        unsupported=unsupported,
        build=build,
        recipe=ours,
        modes=("compile",),
        way="torchao",
        ranks={"fsdp2": ("compile", "cudagraph"), "tp": ("compile",)},
        adoption=Adoption(
            unsupported=torchao.lacks_for,
            build=adopt,
            code=lambda vocab: torchao.code(theirs, vocab),
            modes=("compile-blocks", "compile"),
        ),
    )
