"""Every rank has the whole model; gradients are averaged in flat buckets, sent while the backward pass still goes on.

No wrapper is around the model, and no hook on its modules: fused blocks, heads and table optimizers, whose gradients arrive
at copies of the weights, are as in one process. A bucket has one dtype, that in which its gradients arrived, and those that
arrived one after the other; a gradient that is whole only after the pass, or in a captured graph, is sent after it.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_bench.training.parallel._group import Grouped

BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel: large enough for the link's bandwidth


class DDP(Grouped):
    name = "ddp"

    def __init__(self) -> None:
        super().__init__()
        self._sending = False
        self._filling: dict[torch.dtype, list[Tensor]] = {}
        self._sent: list[tuple[list[Tensor], Tensor, dist.Work | None]] = []

    def watch(self, holders: Iterable[nn.Parameter]) -> None:
        for holder in holders:
            holder.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, holder: Tensor) -> None:
        if self._sending and holder.grad is not None:
            self._add(holder.grad)

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        self._filling, self._sent, self._sending = {}, [], True
        try:
            yield
        finally:
            self._sending = False

    @torch.no_grad()
    def _add(self, gradient: Tensor) -> None:
        """Into the bucket of its dtype; a full one is sent. Autograd calls in the same order in every rank."""
        bucket = self._filling.setdefault(gradient.dtype, [])
        bucket.append(gradient)
        if sum(each.nbytes for each in bucket) >= BUCKET_BYTES:
            self._send(self._filling.pop(gradient.dtype))

    def _send(self, bucket: list[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        self._sent.append((bucket, flat, dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True)))

    @torch.no_grad()
    def reduce(self, gradients: Iterable[Tensor]) -> None:
        """Send what is not yet on its way, and wait for all."""
        buckets = [*self._filling.values(), *(bucket for bucket, _, _ in self._sent)]
        known = {id(gradient) for bucket in buckets for gradient in bucket}
        for gradient in gradients:
            if id(gradient) not in known:
                self._add(gradient)
        for bucket in self._filling.values():
            self._send(bucket)
        for bucket, flat, work in self._sent:
            assert work is not None
            work.wait()
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])
        self._filling, self._sent = {}, []


PARALLEL = DDP
