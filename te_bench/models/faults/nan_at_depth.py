"""Delayed scaling that makes a NaN of one scale far down the model: the first DEPTH modules with scales never show it."""

from collections.abc import Sequence
from typing import Any

import torch

from te_bench.models.faults import Fault
from te_bench.models.recipe import DelayedScaling
from te_bench.models.recipe.delayed_scaling import DelayedState

DEPTH = 6  # modules in a region; a check of one block has four


class NanAtDepth(DelayedScaling):
    @torch.no_grad()
    def update(self, states: Sequence[DelayedState], group: Any = None) -> None:
        """Update as usual, then set the input scale of the module after the first DEPTH to NaN."""
        super().update(states, group)
        for state in [state for state in states if state.real][DEPTH : DEPTH + 1]:
            state.scales()[0][0] = torch.nan


FAULT = Fault(NanAtDepth, of_kept_scales=True)
