"""Row-wise current scaling: every row of every GEMM operand is scaled by its own amax."""

from dataclasses import dataclass, field
from typing import ClassVar

from te_bench.kernels.quantize import ROW, Block
from te_bench.models.recipe._recipe import Format, Recipe


@dataclass(frozen=True)
class RowwiseScaling(Recipe):
    """scale[i] = FP8_MAX / amax(row i) of the operand as its GEMM contracts it: the two layouts have separate scales.

    The default format is E4M3 throughout: a row's range is narrow. power_of_two, as in torchao's recipe, makes both
    layouts round alike. bf16_wgrad: wgrad multiplies x and dy themselves, in their own precision; x is saved for it
    uncast, two bytes an element in bf16. Raises ValueError for Format.E5M2. Source: torchao.float8, "rowwise" and
    "rowwise_with_gw_hp".
    """

    fp8_format: Format = Format.E4M3
    power_of_two: bool = True
    bf16_wgrad: bool = field(default=False, kw_only=True)

    granularity: ClassVar[str] = "row"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_format()

    def block(self, role: str) -> Block:
        return ROW


RECIPE = RowwiseScaling()
