"""Every rank has the whole model; gradients are averaged in flat buckets, sent while the backward pass still goes on.

No wrapper is around the model, and no hook on its modules: fused blocks, heads and table optimizers, whose gradients arrive
at copies of the weights, are as in one process. The first pass plans the buckets: each of one dtype, that in which its
gradients arrive, from the last parameter to the first, as a backward pass goes. Every rank sends them in that order,
whatever the order in which its own gradients arrive; one that is whole only after the pass is sent after it. All ranks must
have gradients of the same parameters in every pass: zeros in place of others would not be what one process computes.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_bench.training.parallel import Indivisible
from te_bench.training.parallel._group import Grouped

BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel: large enough for the link's bandwidth
OTHERS = "{}, as with experts or blocks that not every token reaches: such a model needs one process"

Kind = tuple[int, int, str]  # a gradient's: its parameter's place, elements and dtype


@dataclass(frozen=True)
class _Plan:
    """What has a gradient, and which places make up each bucket, in the order in which those are sent."""

    kinds: list[Kind]
    buckets: list[list[int]]
    places: dict[int, int]  # by id of the holder


class DDP(Grouped):
    name = "ddp"

    def __init__(self) -> None:
        super().__init__()
        self._sending = False
        self._plan: _Plan | None = None
        self._arrived: dict[int, Tensor | None] = {}  # by id of the holder, or once there is a plan by its place
        self._sent: list[tuple[list[Tensor], Tensor, dist.Work | None]] = []

    def watch(self, holders: Iterable[nn.Parameter]) -> None:
        for holder in holders:
            holder.register_post_accumulate_grad_hook(self._arrive)

    @torch.no_grad()
    def _arrive(self, holder: Tensor) -> None:
        if not self._sending:
            return
        if self._plan is None:
            self._arrived[id(holder)] = None
        elif (place := self._plan.places.get(id(holder))) is not None:
            self._arrived[place] = holder.grad
            self._send_whole(self._plan)

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        self._arrived, self._sent, self._sending = {}, [], True
        try:
            yield
        finally:
            self._sending = False

    def _send_whole(self, plan: _Plan) -> None:
        """Send the next buckets, as far as their gradients have arrived."""
        for bucket in plan.buckets[len(self._sent) :]:
            gradients = [gradient for place in bucket if (gradient := self._arrived.get(place)) is not None]
            if len(gradients) < len(bucket):
                return
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self._sent.append(
                (gradients, flat, dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group, async_op=True))
            )

    @torch.no_grad()
    def reduce(self, holders: Iterable[nn.Parameter]) -> None:
        """Send what is not yet on its way, and wait for all. Raises Indivisible where ranks have gradients of others."""
        held = [(place, holder) for place, holder in enumerate(holders) if holder.grad is not None]
        kinds = [(place, holder.numel(), str(holder.grad.dtype)) for place, holder in held if holder.grad is not None]
        if self._plan is None:
            self._plan = self._planned(held, kinds)
            self._arrived = {}
        elif kinds != self._plan.kinds:
            raise Indivisible(OTHERS.format("this pass brought gradients of other parameters than the first"))
        self._arrived |= {place: holder.grad for place, holder in held}
        self._send_whole(self._plan)
        for bucket, flat, work in self._sent:
            assert work is not None
            work.wait()
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])
        self._arrived, self._sent = {}, []

    def _planned(self, held: list[tuple[int, nn.Parameter]], kinds: list[Kind]) -> _Plan:
        """The same in every rank, as all find out together. What arrives while a pass goes on comes before what does not."""
        late = [place for place, holder in held if id(holder) not in self._arrived]
        self._require_alike((kinds, late), self.device)
        buckets: list[list[int]] = []
        filling: dict[str, list[int]] = {}
        nbytes = {place: 0 if holder.grad is None else holder.grad.nbytes for place, holder in held}
        for place, _, dtype in sorted(kinds, key=lambda kind: (kind[0] in late, -kind[0])):
            bucket = filling.setdefault(dtype, [])
            bucket.append(place)
            if sum(nbytes[each] for each in bucket) >= BUCKET_BYTES:
                buckets.append(filling.pop(dtype))
        return _Plan(kinds, [*buckets, *filling.values()], {id(holder): place for place, holder in held})

    def _require_alike(self, value: object, device: torch.device) -> None:
        digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])
        most = torch.tensor([digest, -digest], device=device)  # the largest, and less the smallest
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if most.sum().item():
            raise Indivisible(OTHERS.format("the ranks' first pass brought them gradients of different parameters"))


PARALLEL = DDP
