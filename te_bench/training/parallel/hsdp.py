"""fsdp2 within groups of ranks, ddp between them: torch's fully_shard over a mesh of two dimensions.

Each group has the whole model, and each of its ranks a share of every matrix. Blocks are gathered, and gradients
reduce-scattered, within a group over the fast link of one host. Ranks with the same share then average it over the
groups, once a step, over the slow link between hosts. Ranks of a group are consecutive.
"""

import contextlib
import itertools
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from te_bench.training.parallel import Indivisible
from te_bench.training.parallel._group import require_groups
from te_bench.training.parallel.fsdp2 import FSDP2


class HSDP(FSDP2):
    """shard: the number of ranks in a group; None: the ranks of one host, of at least two hosts. gather: as fsdp2's."""

    name = "hsdp"

    def __init__(self, shard: int | None = None, gather: Literal["fp8"] | None = None) -> None:
        super().__init__(gather)
        self.shards = self._of_a_host() if shard is None else shard
        require_groups(self.shards, self.world, "fsdp2", "ddp")
        self._model: Any = None

    def _of_a_host(self) -> int:
        """Return the ranks of a host. Raises Indivisible for one host, and if hosts have different numbers of ranks."""
        names = self.of_all(socket.gethostname())
        hosts = Counter(names)
        if len(hosts) == 1:
            raise Indivisible(f"all {self.world} ranks are on one host: say how many share the weights, shard=N")
        sizes = set(hosts.values())
        runs = sum(one != other for one, other in itertools.pairwise(names))
        if len(sizes) > 1 or runs != len(hosts) - 1:
            raise Indivisible(
                f"hosts have {', '.join(f'{n} ({name})' for name, n in hosts.items())} of the ranks, in this order: "
                "give each equally many that follow one another, or say how many share the weights, shard=N"
            )
        return sizes.pop()

    def _mesh(self) -> DeviceMesh:
        sizes = (self.world // self.shards, self.shards)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=("replicas", "shards"))

    def prepare(self, model: nn.Module, multiplies_in: torch.dtype | None) -> None:
        super().prepare(model, multiplies_in)
        self._model = model
        self._model.set_requires_all_reduce(False)

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """All-reduce over the groups only in the last backward pass, which carries the earlier micro-batches' sums."""
        self._model.set_requires_all_reduce(True)
        try:
            with super().reducing():
                yield
        finally:
            self._model.set_requires_all_reduce(False)


PARALLEL = HSDP
