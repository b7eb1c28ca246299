"""torchtitan's with torchao's FP8 Linears: by a scale a tensor, weights and shared layers' inputs are sent in FP8.

With row scales everything is sent in bf16, as torchtitan does. Weight scales come from one all-reduce before a step's
first pass; torchao's users do it after each update. So a captured step includes it.

Source: torchao 0.18.0, float8/fsdp_utils.py and float8/float8_tensor_parallel.py; torchtitan v0.2.2,
models/llama3/infra/parallelize.py.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from te_bench.models.checkpointing import blocks_of
from te_bench.training.ways import torchtitan


def _by_tensor(layer: nn.Module) -> bool:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_linear import Float8Linear

    if not isinstance(layer, Float8Linear):
        return False
    granularity: Any = layer.config.cast_config_weight.scaling_granularity
    return granularity is ScalingGranularity.TENSORWISE


class Sharded(torchtitan.Sharded):
    """torchtitan's fsdp2 that gathers blocks' weights with one scale per tensor in FP8."""

    def _shard(self, model: nn.Module, multiplies_in: torch.dtype | None) -> None:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
        from torchao.float8.float8_linear import Float8Linear

        for block in blocks_of(model):
            for parent in list(block.modules()):
                for name, layer in list(parent.named_children()):
                    if _by_tensor(layer):
                        found: Any = layer
                        config = dataclasses.replace(found.config, enable_fsdp_float8_all_gather=True)
                        setattr(parent, name, Float8Linear.from_float(found, config))
        super()._shard(model, multiplies_in)
        self._scaled = False

        def scale(*_: Any) -> None:
            if not self._scaled:
                precompute_float8_dynamic_scale_for_fsdp(model)
                self._scaled = torch.is_grad_enabled()  # an evaluation's weights may be changed by others next

        model.register_forward_pre_hook(scale, prepend=True)  # before any weight is gathered

    def reduce(self, holders: Iterable[nn.Parameter]) -> None:
        self._scaled = False
        super().reduce(holders)

    def gathered(self, model: nn.Module, gather: str | None, tokens: int = 0) -> dict[str, tuple[int, int]]:
        layers: list[Any] = [layer for block in blocks_of(model) for layer in block.modules() if _by_tensor(layer)]
        return self._block_bytes(model, {layer.weight for layer in layers}) if layers else {}


class SharedLayers(torchtitan.SharedLayers):
    """torchtitan's tp that gathers a per-tensor-scaled column Linear's input, and a row Linear's gradient, in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self._features = 0  # features per token gathered in FP8

    def gathered(self, model: nn.Module, gather: str | None, tokens: int = 0) -> dict[str, tuple[int, int]]:
        return {"uint8": (tokens * self._features,) * 2} if self._features else {}

    def _style(self, layer: nn.Module, mode: str) -> Any:
        if not _by_tensor(layer):
            return super()._style(layer, mode)
        linear: Any = layer
        self._features += linear.in_features if mode == "column" else linear.out_features
        from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

        if mode == "column":
            return Float8ColwiseParallel(input_layouts=Shard(1))
        return Float8RowwiseParallel(output_layouts=Shard(1))


MODES = {"fsdp2": Sharded, "tp": SharedLayers}
