"""Delayed scaling whose scales are as a one-step history leaves them when every other step is 256 times as large.

Text has no such steps, on which a short history alone would change nothing. So the fault multiplies the scales by SPIKE
before every other step, which saturates.
"""

from collections.abc import Sequence
from typing import Any

import torch

from te_bench.models.faults import Fault
from te_bench.models.recipe import DelayedScaling
from te_bench.models.recipe.delayed_scaling import DelayedState

SPIKE = 2.0**8  # E4M3 spans 2^17.8, so a history that remembers the spikes keeps half of it


class ShortHistory(DelayedScaling):
    @torch.no_grad()
    def update(self, states: Sequence[DelayedState], group: Any = None) -> None:
        """Clear all rows of the histories but row 0, the current step, update as usual, and spike every other step."""
        tables = {id(table): table for state in states if state.real for table in (state.forward, state.backward)}
        cast = [table.written[0][0] != 0 for table in tables.values()]  # what has a new amax
        for table in tables.values():
            table.written[0][1:] = 0
        super().update(states, group)
        for table, new in zip(tables.values(), cast, strict=True):
            _, scale, counts = table.written
            counts[-1] += new.any()  # steps: the last slot is of no tensor
            scale *= torch.where(new & (counts[-1] % 2 == 1), SPIKE, 1.0)


FAULT = Fault(ShortHistory, of_kept_scales=True)
