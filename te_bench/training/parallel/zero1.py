"""ddp whose optimizer states are shared out: ZeRO-1, of torch's AdamW by its ZeroRedundancyOptimizer.

Every rank has the whole model and its gradients, averaged as ddp's are. Only one rank has a parameter's moments; it
updates the parameter and sends it to the others, so steps equal ddp's. Parameters are dealt from the largest to the
smallest, each to the rank with the fewest elements so far. A rank's parameters lie in one buffer, sent in one piece.
Source: Rajbhandari et al., ZeRO, arXiv:1910.02054.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from te_bench.training.parallel import Indivisible
from te_bench.training.parallel._group import norm_of_parts
from te_bench.training.parallel.ddp import DDP

ALIGNED = 64  # parameters begin at multiples of this many elements: kernels load vectors


class ZeRO1(DDP):
    name = "zero1"

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[Tensor] = []  # {rank: the buffer of the parameters that it owns}

    @classmethod
    def refused(cls, *, mode: str, optimizer: str | None, **others: Any) -> str | None:
        if mode == "cudagraph" and optimizer is None:
            return "no captured graph sends what torch's AdamW has updated; choose ddp, or mode eager or compile"
        return None

    def shared(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
        return ZeroRedundancyOptimizer(
            optimizer.param_groups,
            type(optimizer),
            lr=optimizer.defaults["lr"],
            parameters_as_bucket_view=len(dtypes) == 1,  # one message per rank
        )

    @torch.no_grad()
    def owners(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        if len(dtypes := {parameter.dtype for parameter in parameters}) > 1:
            said = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise Indivisible(f"zero1: the parameters are {said}, and a rank sends its own in one piece; choose ddp")
        sizes, owners = [0] * self.world, [0] * len(parameters)
        places: list[list[tuple[nn.Parameter, int]]] = [[] for _ in sizes]
        for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
            rank = owners[i] = sizes.index(min(sizes))
            places[rank].append((parameters[i], sizes[rank]))
            sizes[rank] += -(-parameters[i].numel() // ALIGNED) * ALIGNED
        self._buffers = [parameters[0].new_zeros(size) for size in sizes]
        for buffer, owned in zip(self._buffers, places, strict=True):
            for parameter, start in owned:
                place = buffer[start : start + parameter.numel()].view(parameter.shape)
                parameter.data = place.copy_(parameter)
        return owners

    @torch.no_grad()
    def updated(self) -> None:
        sent = [dist.broadcast(buffer, src=rank, async_op=True) for rank, buffer in enumerate(self._buffers)]
        for work in sent:
            assert work is not None
            work.wait()

    def of_parts(self, norm: Tensor) -> Tensor:
        return norm_of_parts(norm)


PARALLEL = ZeRO1
