"""Mutations of a training step that tests of several layers must see."""

import pytest
from torch import Tensor

from te_bench.models.table_adamw import TableAdamW


def no_clip_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is measured, and no gradient scaled by it."""
    right = TableAdamW.clip

    def clip(self: TableAdamW, max_norm: float) -> Tensor:
        norm = right(self, max_norm)
        self._multiplier = None
        return norm

    monkeypatch.setattr(TableAdamW, "clip", clip)
