"""Delayed scaling whose amax history holds the last step alone: each spike after a quiet step saturates anew."""

from collections.abc import Sequence
from typing import Any

import torch

from te_bench.models.faults import Fault
from te_bench.models.recipe import DelayedScaling
from te_bench.models.recipe.delayed_scaling import DelayedState


class ShortHistory(DelayedScaling):
    @torch.no_grad()
    def update(self, states: Sequence[DelayedState], group: Any = None) -> None:
        """Clear all rows of the histories but row 0, the current step, then update as usual."""
        for state in states:
            for table in (state.forward, state.backward):
                table.written[0][1:] = 0
        super().update(states, group)


FAULT = Fault(ShortHistory, of_kept_scales=True)
