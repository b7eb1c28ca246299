"""Every rank has a share of each parameter, gradient and moment: torch's fully_shard on each block and on the rest.

A block's weights are gathered before its forward and its backward pass, in float32, and its gradients scattered in
float32: nothing is rounded that one process would not round. After each micro-batch a rank has its share of the gradients.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from te_bench.training.parallel._group import Grouped


class FSDP2(Grouped):
    name = "fsdp2"

    def unsupported(self, *, precision: str, mode: str, optimizer: str | None, blocks: str | None) -> str | None:
        if blocks is not None:
            return "fused blocks pass by the modules that gather the weights; choose ddp, or blocks that are not fused"
        if optimizer is not None:
            return f"the optimizer {optimizer} updates whole parameters, and a rank has shares; choose ddp"
        if mode != "eager":
            return f"te-bench does not compile or capture the gathers of weights; choose mode eager, not {mode}"
        if precision == "fp16":
            return "the gradient scaler sees one rank's shares alone; choose bf16"
        return None

    def prepare(self, model: nn.Module) -> None:
        super().prepare(model)
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList):
                for block in module:
                    fully_shard(block)
        fully_shard(model)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        norm = clip_grad_norm_(parameters, max_norm, foreach=True)
        return self.whole(norm)

    def whole(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        with torch.no_grad():
            return x.full_tensor()


PARALLEL = FSDP2
