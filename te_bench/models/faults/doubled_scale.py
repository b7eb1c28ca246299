"""Every scale twice too large: the upper half of each tensor's, row's or block's range saturates."""

import torch
from torch import Tensor

from te_bench.kernels.quantize import Operand, Quantized
from te_bench.kernels.quantize.backends.reference import spread
from te_bench.models.faults import Fault
from te_bench.models.recipe import Recipe, Slot


class DoubledScale(Recipe):
    def quantize(
        self, x: Tensor, role: str, slot: Slot, *, rowwise: bool, columnwise: bool, column_sum: Tensor | None = None
    ) -> Quantized:
        """Cast correctly for scales, amax and column sums, then cast the data again with twice the scale."""
        right = super().quantize(
            x, role, slot._replace(counts=None), rowwise=rowwise, columnwise=columnwise, column_sum=column_sum
        )
        row = _doubled(x, right.by_rows(), slot.counts)
        column = _doubled(x.t(), right.by_columns(), None if rowwise else slot.counts)
        return Quantized(*row, *column, right.layout)


def _doubled(x: Tensor, right: Operand, counts: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return x * 2 / scale_inv in FP8, and scale_inv / 2; (None, None) for an orientation that was not requested."""
    if right.data is None:
        return None, None
    limit = torch.finfo(right.layout.format).max
    v = x.detach().float().contiguous()
    scaled = 2 * (v / spread(right))
    data = scaled.clamp(-limit, limit).to(right.layout.format)
    if counts is not None:
        finite = torch.isfinite(v)
        saturated, underflowed = finite & (scaled.abs() > limit), (v != 0) & (data.float() == 0)
        counts.add_(torch.stack([saturated.sum(), underflowed.sum(), (~finite).sum()]))
    return data, right.scale_inv / 2


FAULT = Fault(DoubledScale, of_fp8=True)
