"""What the modes over a process group share: a rank's rows, the mean loss, and ranks that begin alike."""

import datetime
import functools
import gc
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from te_bench.models.recipe import largest_of_ranks
from te_bench.training.parallel import Indivisible, Parallel


class Grouped(Parallel):
    """A rank of the default process group."""

    def __init__(self) -> None:
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.replicas, self.replica = self.world, self.rank
        self._shapes: set[tuple[torch.Size, ...]] = set()  # that all ranks were given at once
        self.group: Any = None  # over which gradients are averaged; None: all ranks
        _patient(dist.group.WORLD)  # every rank makes it at once

    def prepare(self, model: nn.Module, multiplies_in: torch.dtype | None) -> None:
        """Rank 0's weights in every rank; delayed scaling shares its amaxes, and dropout draws other masks in each."""
        gc.collect()  # delayed scaling shares the amaxes of every state that lives, in one rank as in another
        self.device = next(model.parameters()).device
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, src=0)
        model.shares_amaxes = True  # type: ignore[assignment]
        torch.manual_seed(torch.initial_seed() + self.draws)
        self.divide(model)

    def divide(self, model: nn.Module) -> None:
        """Leave this rank its part of layers that ranks share."""

    def seed(self, seed: int) -> int:
        return seed << 16 | self.draws

    def require_same_batch(self, *batch: Tensor) -> None:
        shapes = tuple(x.shape for x in batch)
        if shapes in self._shapes:
            return
        found = self.of_all((shapes, _digest(batch)))
        if any(each != shapes for each, _ in found):
            given = ", ".join(
                f"rank {rank} {' and '.join(map(str, map(tuple, each)))}" for rank, (each, _) in enumerate(found)
            )
            raise ValueError(f"ranks have batches of other shapes, {given}: each is to give the global batch")
        if len({digest for _, digest in found}) > 1:
            raise ValueError(
                "ranks have batches of one shape and other contents: each is to give the global batch, and takes its own "
                "rows of it. Let no sampler share out the data"
            )
        self._shapes.add(shapes)

    def rows(self, x: Tensor) -> Tensor:
        if len(x) % self.replicas:
            raise ValueError(f"{len(x)} rows of a micro-batch do not divide into {self.replicas} ranks")
        return x.chunk(self.replicas)[self.replica]

    def of_all(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=_patient(dist.group.WORLD))
        return found

    def meet(self) -> None:
        meet()

    def largest(self, x: Tensor) -> Tensor:
        return largest_of_ranks(x)

    def mean(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        return loss


def _digest(batch: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for x in batch:
        found.update(x.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return found.hexdigest()


def clip_by_kinds(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    kind_of: Callable[[nn.Parameter, Tensor], Any],
    norm_of_all: Callable[[Any, Tensor], Tensor],
) -> Tensor:
    """Parallel.clip of gradients that torch's own takes apart alone, such as DTensors and others.

    kind_of(parameter, gradient): those of one kind go together. norm_of_all(kind, norm): that of all ranks' by this rank's.
    """
    kinds: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        if p.grad is not None:
            kinds.setdefault(kind_of(p, p.grad), []).append(p)
    norms = [
        norm_of_all(kind, get_total_norm([p.grad for p in alike if p.grad is not None], foreach=True))
        for kind, alike in kinds.items()
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for alike in kinds.values():
        clip_grads_with_norm_(alike, max_norm, norm, foreach=True)
    return norm


def norm_of_parts(norm: Tensor, group: Any = None) -> Tensor:
    """The norm of what the ranks of a group, None: all, have each a part of, by that of this rank's part."""
    squares = norm.double().square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt().to(norm.dtype)


def require_groups(shard: int, world: int, all_in_one: str, one_each: str) -> None:
    """Raise Indivisible where groups of `shard` ranks are no proper part of all, naming other modes."""
    if world % shard or not 1 < shard < world:
        raise Indivisible(
            f"shard {shard}: of {world} ranks a group is a divisor, more than one and fewer than all; choose "
            f"{all_in_one} for one group of all, {one_each} for groups of one"
        )


def meet() -> None:
    """Parallel.meet of all ranks."""
    dist.barrier(group=_patient(dist.group.WORLD))


@functools.cache
def _patient(world: Any) -> Any:
    """A group of all ranks that waits for what each does by itself, however long the slowest takes."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=1))
