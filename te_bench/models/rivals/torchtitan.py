"""torchtitan's step over ranks in bf16: fully_shard or layers shared by DTensor, each block under torch.compile.

The blocks are te-bench's, in plain PyTorch like torchtitan's; training.ways.torchtitan divides and compiles them.
"""

from typing import TYPE_CHECKING

from te_bench.models.configs import DecoderConfig
from te_bench.models.rivals import Capability, Rival

if TYPE_CHECKING:
    from te_bench.models.decoder import Decoder


def unsupported(config: DecoderConfig, device: str, capability: Capability) -> str | None:
    return None


def build(model: "Decoder") -> None:
    """Do nothing: training.ways.torchtitan changes the model, in each rank."""


RIVAL = Rival(
    title="torchtitan",
    packages=(),
    unsupported=unsupported,
    build=build,
    recipe=None,
    modes=(),
    way="torchtitan",
    ranks={"fsdp2": ("compile", "cudagraph"), "tp": ("compile",)},
)
