"""A model whose Linears but the head's are torchao.float8's; a user's, under torch.compile as te-bench's own."""

from typing import TYPE_CHECKING

from te_bench.models.configs import DecoderConfig
from te_bench.models.peers import torchao
from te_bench.models.rivals import Adoption, Capability, Changed, Rival

if TYPE_CHECKING:
    from torch import nn

    from te_bench.models.decoder import Decoder


def rival(theirs: str, ours: str) -> Rival:
    """torchao's recipe `theirs`, whose arithmetic is te_bench's recipe `ours`; the head stays in bf16."""

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
        ),
    )
