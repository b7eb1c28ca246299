"""What the modes over a process group share: a rank's rows, the mean loss, and ranks that begin alike."""

import datetime
import functools
import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_bench.training.parallel import Parallel


class Grouped(Parallel):
    """A rank of the default process group."""

    def __init__(self) -> None:
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        _patient(dist.group.WORLD)  # every rank makes it at once

    def prepare(self, model: nn.Module, multiplies_in: torch.dtype | None) -> None:
        """Rank 0's weights in every rank; delayed scaling shares its amaxes, and dropout draws other masks in each."""
        gc.collect()  # delayed scaling shares the amaxes of every state that lives, in one rank as in another
        self.device = next(model.parameters()).device
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, src=0)
        model.shares_amaxes = True  # type: ignore[assignment]
        torch.manual_seed(torch.initial_seed() + self.rank)

    def seed(self, seed: int) -> int:
        return seed << 16 | self.rank

    def rows(self, x: Tensor) -> Tensor:
        if len(x) % self.world:
            raise ValueError(f"{len(x)} rows of a micro-batch do not divide into {self.world} ranks")
        return x.chunk(self.world)[self.rank]

    def meet(self) -> None:
        dist.barrier(group=_patient(dist.group.WORLD))

    def mean(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        return loss


@functools.cache
def _patient(world: Any) -> Any:
    """A group of all ranks that waits for what each does by itself, however long the slowest takes."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=1))
