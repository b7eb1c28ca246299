"""Every rank has a share of each layer's large weights and computes the whole batch: tensor parallelism.

The sums of partial products are sent, in the activations' dtype: of a pair of Linears two, one in the forward and one in the
backward pass (_shared_layers). So they are of embedding and head, as of a pair, where ranks share the vocabulary; and of
what every rank has whole, and sees a part of, the gradients.
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
