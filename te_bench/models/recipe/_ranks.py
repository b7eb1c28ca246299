"""What recipes of several ranks have in common."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def largest_of_ranks(x: Tensor, group: Any = None) -> Tensor:
    """Each element's maximum over the group, None: all ranks; infinity where one has NaN, which not every backend keeps."""
    x = x.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x
