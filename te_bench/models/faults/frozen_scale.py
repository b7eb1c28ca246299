"""Delayed scaling whose scales stay what the first step made them, whatever becomes of the tensors."""

from collections.abc import Sequence
from typing import Any

import torch

from te_bench.models.faults import Fault
from te_bench.models.recipe import DelayedScaling
from te_bench.models.recipe.delayed_scaling import DelayedState


class FrozenScale(DelayedScaling):
    @torch.no_grad()
    def update(self, states: Sequence[DelayedState], group: Any = None) -> None:
        """Update as usual, then restore each scale that had already changed from its initial 1."""
        scales = [scale for state in states for scale in state.scales()]
        before = [scale.clone() for scale in scales]
        super().update(states, group)
        for scale, frozen in zip(scales, before, strict=True):
            scale.copy_(torch.where(frozen == 1, scale, frozen))


FAULT = Fault(FrozenScale, of_kept_scales=True)
