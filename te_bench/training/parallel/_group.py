"""Base class of the modes over a process group: a rank's rows, the mean loss, and equal initial weights."""

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
        self._shapes: set[tuple[torch.Size, ...]] = set()  # shapes of batches that the ranks have compared
        self.group: Any = None  # the group that averages gradients; None: all ranks
        _patient(dist.group.WORLD)  # collective: every rank must create the group

    def prepare(self, model: nn.Module, multiplies_in: torch.dtype | None) -> None:
        """Broadcast rank 0's weights; let delayed scaling share amaxes, and give each rank its own dropout seed."""
        gc.collect()  # free dead FP8 states first: all living ones share amaxes, so ranks must have the same
        self.device = next(model.parameters()).device
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, src=0)
        model.shares_amaxes = True  # type: ignore[assignment]
        torch.manual_seed(torch.initial_seed() + self.draws)
        self.divide(model)

    def divide(self, model: nn.Module) -> None:
        """Cut shared layers down to this rank's part."""

    def seed(self, seed: int) -> int:
        return seed << 16 | self.draws

    def require_same_batch(self, *batch: Tensor) -> None:
        shapes = tuple(x.shape for x in batch)
        if shapes in self._shapes:
            return
        batches = self.of_all((shapes, _digest(batch)))
        if any(each != shapes for each, _ in batches):
            given = ", ".join(
                f"rank {rank} {' and '.join(map(str, map(tuple, each)))}" for rank, (each, _) in enumerate(batches)
            )
            raise ValueError(f"ranks have batches of other shapes, {given}: each is to give the global batch")
        if len({digest for _, digest in batches}) > 1:
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
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=_patient(dist.group.WORLD))
        return values

    def largest(self, x: Tensor) -> Tensor:
        return largest_of_ranks(x)

    def mean(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        return loss


def _digest(batch: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for x in batch:
        digest.update(x.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def clip_by_kinds(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    kind_of: Callable[[nn.Parameter, Tensor], Any],
    norm_of_all: Callable[[Any, Tensor], Tensor],
) -> Tensor:
    """Parallel.clip for gradients that torch cannot clip together, such as DTensors and plain tensors.

    kind_of(parameter, gradient) names the kind. norm_of_all(kind, norm) turns this rank's norm into that of all ranks.
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
    """Return the norm of a vector spread over the ranks of a group (None: all), given the norm of this rank's part."""
    squares = norm.double().square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt().to(norm.dtype)


def require_groups(shard: int, world: int, all_in_one: str, one_each: str) -> None:
    """Raise Indivisible, naming other modes, unless `shard` is a divisor of `world` with 1 < shard < world."""
    if world % shard or not 1 < shard < world:
        raise Indivisible(
            f"shard {shard}: of {world} ranks a group is a divisor, more than one and fewer than all; choose "
            f"{all_in_one} for one group of all, {one_each} for groups of one"
        )


def meet() -> None:
    """Wait for all ranks, however long the slowest takes."""
    dist.barrier(group=_patient(dist.group.WORLD))


@functools.cache
def _patient(world: Any) -> Any:
    """Return a gloo group of all ranks with a timeout of an hour, so that one rank's slow work ends no other."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=1))
