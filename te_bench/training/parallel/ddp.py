"""Every rank has the whole model; gradients are averaged in flat buckets, sent while the backward pass still goes on.

The model gets no wrapper and no module hooks, so fused blocks, heads and table optimizers, whose gradients arrive at
copies of the weights, work as in one process. The first pass plans the buckets: one dtype each, from the last parameter
to the first, as a backward pass goes. Every rank sends them in that order, whatever order its gradients arrive in.
Gradients that arrive after the pass, or in parts (layers in several reentrant checkpoints), are sent after it. All
ranks must have gradients of the same parameters in every pass: averaging zeros for a missing one would differ from one
process.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_bench.training.parallel import Indivisible
from te_bench.training.parallel._group import Grouped

BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel: large enough for the link's bandwidth
OTHERS = "{}, as with experts or blocks that not every token reaches: such a model needs one process"

Kind = tuple[int, int, str]  # (index of the parameter, elements, dtype) of a gradient


@dataclass(frozen=True)
class _Buckets:
    """The gradients of a pass, and the indices in each bucket, in the order of sending."""

    kinds: list[Kind]
    buckets: list[list[int]]
    places: dict[int, int]  # {id of holder: index} of gradients that arrive whole during the pass


class DDP(Grouped):
    name = "ddp"

    def __init__(self) -> None:
        super().__init__()
        self._sending = False
        self._plan: _Buckets | None = None
        self._times: Counter[int] = Counter()  # {id of holder: how often the first pass brought it a gradient}
        self._arrived: dict[int, Tensor | None] = {}  # gradients by index
        self._sent: list[tuple[list[Tensor], Tensor, dist.Work | None]] = []

    def watch(self, holders: Iterable[nn.Parameter]) -> None:
        for holder in holders:
            holder.register_post_accumulate_grad_hook(self._arrive)

    @torch.no_grad()
    def _arrive(self, holder: Tensor) -> None:
        if not self._sending:
            return
        if self._plan is None:
            self._times[id(holder)] += 1
        elif (place := self._plan.places.get(id(holder))) is not None:
            if place in self._arrived:  # it may have been sent already
                raise Indivisible(
                    "this pass brought a gradient in more parts than the first, as reentrant checkpoints do: checkpoint "
                    "with use_reentrant=False"
                )
            self._arrived[place] = holder.grad
            self._send_whole(self._plan)

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        self._arrived, self._sent, self._sending = {}, [], True
        self._times.clear()
        try:
            yield
        finally:
            self._sending = False

    def _send_whole(self, plan: _Buckets) -> None:
        """Send the next buckets whose gradients have all arrived."""
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
        """Send the other buckets, wait for all. Raises Indivisible if ranks' gradients are of other parameters."""
        held = [(place, holder) for place, holder in enumerate(holders) if holder.grad is not None]
        kinds = [(place, holder.numel(), str(holder.grad.dtype)) for place, holder in held if holder.grad is not None]
        if self._plan is None:
            self._plan = self._planned(held, kinds)
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

    def _planned(self, held: list[tuple[int, nn.Parameter]], kinds: list[Kind]) -> _Buckets:
        """Return the plan, the same in every rank. Gradients that are whole during the pass come first."""
        late = [place for place, holder in held if self._times[id(holder)] != 1]
        if any(each != (kinds, late) for each in self.of_all((kinds, late))):
            raise Indivisible(OTHERS.format("the ranks' first pass brought them gradients of different parameters"))
        buckets: list[list[int]] = []
        filling: dict[str, list[int]] = {}
        nbytes = {place: 0 if holder.grad is None else holder.grad.nbytes for place, holder in held}
        for place, _, dtype in sorted(kinds, key=lambda kind: (kind[0] in late, -kind[0])):
            bucket = filling.setdefault(dtype, [])
            bucket.append(place)
            if sum(nbytes[each] for each in bucket) >= BUCKET_BYTES:
                buckets.append(filling.pop(dtype))
        places = {id(holder): place for place, holder in held if place not in late}
        return _Buckets(kinds, [*buckets, *filling.values()], places)


PARALLEL = DDP
