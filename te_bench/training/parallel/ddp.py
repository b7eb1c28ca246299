"""Every rank has the whole model; gradients are averaged in flat buckets after the backward pass.

No wrapper is around the model, and no hook on it: fused blocks, heads and table optimizers, whose gradients arrive at
copies of the weights, are as in one process. A bucket has one dtype, that in which its gradients arrived.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from te_bench.training.parallel._group import Grouped

BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel: large enough for the link's bandwidth


class DDP(Grouped):
    name = "ddp"

    @torch.no_grad()
    def reduce(self, gradients: Iterable[Tensor]) -> None:
        """All-reduce them, the last made first; a bucket is filled while the ones before it are on their way."""
        sent = []
        for bucket in buckets(list(gradients)[::-1]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            sent.append((bucket, flat, dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True)))
        for bucket, flat, work in sent:
            work.wait()
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])


def buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, in order, by dtype, in lists of BUCKET_BYTES at most, or of one tensor."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        size = 0
        for tensor in (tensor for tensor in tensors if tensor.dtype is dtype):
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


PARALLEL = DDP
