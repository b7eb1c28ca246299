"""Gradients below a threshold flushed to zero: what a format whose range is too short does to the output's gradients."""

from typing import Any

from torch import Tensor

from te_bench.kernels.quantize import UNDERFLOWED, Quantized
from te_bench.models.faults import Fault
from te_bench.models.recipe import Recipe, Slot

THRESHOLD = 2.0**-4  # of the tensor's largest gradient


class FlushedGradients(Recipe):
    def quantize(self, x: Tensor, role: str, slot: Slot, **asked: Any) -> Quantized:
        if role == "grad_output" and x.numel():
            size = x.detach().abs()
            small = size < THRESHOLD * size.amax()
            if slot.counts is not None:
                slot.counts[UNDERFLOWED] += (small & (size > 0)).sum()
            x = x.masked_fill(small, 0)
        return super().quantize(x, role, slot, **asked)


FAULT = Fault(FlushedGradients)
