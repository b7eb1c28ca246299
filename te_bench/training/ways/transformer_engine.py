"""Transformer Engine's: its layers in torch's DistributedDataParallel, with the largest amaxes of all ranks.

Every micro-batch is reduced. Source: Transformer Engine 2.20.2, docs/examples/te_llama and pytorch/quantization.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from te_bench.training.parallel._group import Grouped


class Replicated(Grouped):
    name = "ddp"

    @classmethod
    def refused(
        cls, *, precision: str, mode: str, optimizer: str | None, blocks: str | None, gather: str | None = None
    ) -> str | None:
        if mode != "eager":
            return f"DistributedDataParallel is for eager steps of Transformer Engine's layers, not for mode {mode}"
        if optimizer is not None:
            return f"the optimizer {optimizer} has copies of weights that DistributedDataParallel does not see; leave it out"
        return "the gradient scaler is not tried with it; choose bf16" if precision == "fp16" else None

    def prepare(self, model: nn.Module, multiplies_in: torch.dtype | None) -> None:
        super().prepare(model, multiplies_in)
        found: Any = model
        if (passes := getattr(found, "passes", None)) is not None:
            autocast = functools.partial(passes.autocast, amax_reduction_group=dist.group.WORLD)
            found.passes = passes._replace(autocast=autocast)

    def forward(self, model: nn.Module) -> Callable[..., Tensor]:
        return DistributedDataParallel(model, broadcast_buffers=False)


MODES = {"ddp": Replicated}
