"""Row-wise current scaling: every row of every GEMM operand is scaled by its own amax."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from te_bench.kernels.quantize import ROW, Quantized
from te_bench.models.recipe._recipe import Format, Recipe, Slot


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
        self._check_format()

    def quantize(
        self, x: Tensor, role: str, slot: Slot, *, rowwise: bool, columnwise: bool, column_sum: Tensor | None = None
    ) -> Quantized:
        if column_sum is not None:
            column_sum += x.sum(0, dtype=torch.float32)  # x.float() would be a copy of twice its bytes
        itself = self._itself(role, columnwise)
        q = self._quantizer(x)(
            x,
            self.dtype(role),
            ROW,
            rowwise=rowwise or itself,
            columnwise=columnwise and not itself,
            power_of_two=self.power_of_two,
            counts=slot.counts,
        )
        return self._with_itself(q, x) if itself else q


RECIPE = RowwiseScaling()
