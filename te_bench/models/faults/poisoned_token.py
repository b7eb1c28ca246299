"""One poisoned token: the last row of each activation is 2^POWER times as large, and whoever shares its scale underflows.

The last token of a batch, for no other attends to it: what the others lose they lose by the scale.
"""

from typing import Any

from torch import Tensor

from te_bench.kernels.quantize import Quantized
from te_bench.models.faults import Fault
from te_bench.models.recipe import Recipe, Slot

POWER = 14  # E4M3 reaches over 2^17.8: of the others only the upper few powers of two are left


class PoisonedToken(Recipe):
    def quantize(self, x: Tensor, role: str, slot: Slot, **asked: Any) -> Quantized:
        if role == "input" and x.numel():
            x = x.detach().clone()
            x[-1] *= 2.0**POWER
        return super().quantize(x, role, slot, **asked)


FAULT = Fault(PoisonedToken)
