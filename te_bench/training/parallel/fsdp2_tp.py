"""Groups of ranks that share each layer, as tp's do, and fsdp2 among ranks of the same place in their groups.

Each group takes its part of the batch. So the fast link of one host carries the layers' sums, and fully_shard gathers
and scatters only a rank's share of the layers. Ranks of a group are consecutive.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from te_bench.training.parallel._group import require_groups
from te_bench.training.parallel._shared_layers import SharedLayers
from te_bench.training.parallel.fsdp2 import FSDP2


class FSDP2TP(SharedLayers, FSDP2):
    """shard: the number of ranks in a group."""

    name = "fsdp2+tp"

    def __init__(self, shard: int, sequence_parallel: bool = False, overlap: str | None = None) -> None:
        super().__init__(sequence_parallel, overlap)
        require_groups(shard, self.world, "tp", "fsdp2")
        self.shards = self.replicas = self.world // shard
        self.replica = self.rank // shard
        self._both: Any = None
        self._in_group = shard

    @classmethod
    def refused(cls, **kind: Any) -> str | None:
        return super().refused(**kind) or FSDP2.refused(**kind)

    def tensor_group(self) -> Any:
        sizes = (self.replicas, self._in_group)
        self._both = init_device_mesh(self.device.type, sizes, mesh_dim_names=("shards", "layers"))
        self.group = self._both["shards"].get_group()
        return self._both["layers"].get_group()

    def _mesh(self) -> DeviceMesh:
        mesh: DeviceMesh = self._both["shards"]
        return mesh


PARALLEL = FSDP2TP
