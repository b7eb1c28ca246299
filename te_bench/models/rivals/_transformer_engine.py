"""A rival with Transformer Engine's TransformerLayer as blocks, and its RMSNorm as last norm.

Its users write a Llama so; embedding, head and loss stay PyTorch's, in bf16. Weights are float32 under autocast, as
te-bench trains them. Each pass hands the layers the current weights: an optimizer may have replaced them by copies.

Source: Transformer Engine 2.20.2, docs/examples/te_llama.
"""

import functools
from typing import TYPE_CHECKING

from te_bench.models.configs import DecoderConfig
from te_bench.models.peers import transformer_engine
from te_bench.models.rivals import Capability, Rival, _parts

if TYPE_CHECKING:
    from te_bench.models.decoder import Decoder


def rival(recipe: str, least: tuple[int, int] = (8, 9)) -> Rival:
    """Make the rival of one of its recipes, with default settings, from the compute capability `least` on."""

    def unsupported(config: DecoderConfig, device: str, capability: Capability) -> str | None:
        if reason := transformer_engine.lacks(device):
            return reason
        if capability is None or capability < least:
            return f"needs an NVIDIA GPU of compute capability {least[0]}.{least[1]} or newer"
        return _parts.unlike_llama(config)

    def build(model: "Decoder") -> None:
        from te_bench.models.decoder import Passes

        layers, norm = transformer_engine.layers(model), transformer_engine.last_norm(model)
        body = functools.partial(transformer_engine.body, layers, norm)
        model.passes = Passes(body, transformer_engine.autocast_of(recipe, {}))

    return Rival(
        title="Transformer Engine",
        packages=("transformer_engine",),
        unsupported=unsupported,
        build=build,
        recipe=recipe,
        modes=("eager", "cudagraph"),
        way="transformer_engine",
        ranks={"ddp": ("eager",), "fsdp2": ("eager",), "tp": ("eager",)},
        own_blocks=True,
        own_attention=True,
        kernels=r"rmsnorm_fwd_(tuned|general)_kernel",
    )
