"""Every rank has a share of each layer's large weights and computes the whole batch: tensor parallelism.

Partial products are all-reduced in the activations' dtype: each pair of Linears has one sum in the forward and one in
the backward pass (_shared_layers). A shared vocabulary makes embedding and head such a pair. Gradients of whole
parameters that see only a part of the tokens or heads are summed too.
"""

from typing import Any

import torch.distributed as dist

from te_bench.training.parallel._shared_layers import SharedLayers


class TP(SharedLayers):
    name = "tp"

    def __init__(self, sequence_parallel: bool = False, overlap: str | None = None) -> None:
        super().__init__(sequence_parallel, overlap)
        self.replicas, self.replica = 1, 0

    def tensor_group(self) -> Any:
        return dist.group.WORLD


PARALLEL = TP
