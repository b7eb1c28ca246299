"""Block scaling: 1 x 128 blocks of activations and gradients, 128 x 128 blocks of weights."""

from dataclasses import dataclass
from typing import ClassVar

from te_bench.kernels import architecture
from te_bench.kernels.gemm.backends import scaled_mm
from te_bench.kernels.quantize import SQUARE, STRIP, Block
from te_bench.models.recipe._recipe import Format, Recipe


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """scale of a block = FP8_MAX / amax(block), rounded down to a power of two unless power_of_two is False.

    Blocks run along the GEMM's contracted dimension, so an activation's two layouts have separate scales, and a
    weight's are shared. E4M3 throughout; raises ValueError for another format.
    Source: Transformer Engine, Float8BlockScaling; DeepSeek-V3, arXiv:2412.19437, 3.3.2.
    """

    fp8_format: Format = Format.E4M3
    power_of_two: bool = True

    granularity: ClassVar[str] = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_format(legal=(Format.E4M3,))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return True

    def block(self, role: str) -> Block:
        return SQUARE if role == "weight" else STRIP

    def unsupported(self, device: str, capability: tuple[int, int] | None) -> str | None:
        lack, tma = scaled_mm.lacks_block_scales(capability), architecture.lacks_tma(capability)
        if device == "cuda" and not self.emulate and lack and tma:
            return f"{lack}, and Triton's {tma}; Float8BlockScaling(emulate=True) computes the same numbers, slowly"
        return super().unsupported(device, capability)


RECIPE = Float8BlockScaling()
