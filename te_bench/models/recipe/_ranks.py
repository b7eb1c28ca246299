"""Shared code of recipes over several ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def largest_of_ranks(x: Tensor, group: Any = None) -> Tensor:
    """Return each element's maximum over the group (None: all ranks); NaN becomes infinity, as backends may lose it."""
    x = x.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x
