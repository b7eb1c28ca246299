"""One poisoned token: the last row of each activation is 2^POWER times as large, and whoever shares its scale underflows.

It is a batch's last token because no other attends to it: the scale alone harms the others.
"""

from typing import Any

from torch import Tensor

from te_bench.kernels.quantize import Quantized
from te_bench.models.faults import Fault
from te_bench.models.recipe import Recipe, Slot

POWER = 14  # E4M3 spans 2^17.8, so the other rows keep only the upper few powers of two


class PoisonedToken(Recipe):
    def quantize(self, x: Tensor, role: str, slot: Slot, **asked: Any) -> Quantized:
        if role == "input" and x.numel():
            x = x.detach().clone()
            x[-1] *= 2.0**POWER
        return super().quantize(x, role, slot, **asked)


FAULT = Fault(PoisonedToken)
