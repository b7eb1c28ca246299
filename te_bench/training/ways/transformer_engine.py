"""Transformer Engine's: its layers in DistributedDataParallel or fully_shard, or divided by their own arguments.

Delayed scaling takes all ranks' largest amaxes. Embedding, head and loss are PyTorch's, divided as te-bench's.

Source: Transformer Engine 2.20.2, docs/examples/te_llama and pytorch/quantization.py; that of 2026-08-22, examples/pytorch/
quantized_model_init/fully_shard.py, pytorch/distributed.py, pytorch/module/layernorm_linear.py; Megatron-LM,
core/distributed/finalize_model_grads.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from te_bench.models.checkpointing import blocks_of
from te_bench.models.modules.tensor_parallel import Division, Ranks
from te_bench.models.peers import transformer_engine
from te_bench.training.parallel import _vocabulary
from te_bench.training.parallel._group import Grouped
from te_bench.training.parallel._shared_layers import part_of
from te_bench.training.parallel.fsdp2 import FSDP2
from te_bench.training.parallel.tp import TP

COPIES = 2  # at most two FP8 copies are gathered: rowwise and columnwise
SCALES = 16  # at least this many data bytes per scale byte: a block of 128 has 4, and up to 4 of padding


class _OfLayers(Grouped):
    """A rank that computes with Transformer Engine's layers."""

    @classmethod
    def refused(
        cls, *, precision: str, mode: str, optimizer: str | None, blocks: str | None, **gathers: Any
    ) -> str | None:
        if mode != "eager":
            return f"Transformer Engine's layers go over ranks in eager steps, not in mode {mode}"
        return super().refused(precision=precision, mode=mode, optimizer=optimizer, blocks=blocks, **gathers)

    def prepare(self, model: Any, multiplies_in: torch.dtype | None) -> None:
        super().prepare(model, multiplies_in)
        if (passes := getattr(model, "passes", None)) is not None:
            autocast = functools.partial(passes.autocast, amax_reduction_group=dist.group.WORLD)
            model.passes = passes._replace(autocast=autocast)


class Replicated(_OfLayers):
    """DistributedDataParallel, which reduces every micro-batch."""

    name = "ddp"

    @classmethod
    def refused(
        cls, *, precision: str, mode: str, optimizer: str | None, blocks: str | None, **gathers: Any
    ) -> str | None:
        if optimizer is not None:
            return f"the optimizer {optimizer} has copies of weights that DistributedDataParallel does not see; leave it out"
        if precision == "fp16":
            return "the gradient scaler is not tried with it; choose bf16"
        return super().refused(precision=precision, mode=mode, optimizer=optimizer, blocks=blocks, **gathers)

    def forward(self, model: nn.Module, compiled: bool) -> Callable[..., Tensor]:
        return DistributedDataParallel(model, broadcast_buffers=False)


class Sharded(_OfLayers, FSDP2):
    """fully_shard on each TransformerLayer and the rest: layers and norms are gathered in bf16 and cast afterwards."""

    def shares(self, parameter: nn.Parameter) -> bool:
        return True

    def _shard(self, model: Any, multiplies_in: torch.dtype | None) -> None:
        """Put each layer into its block, where both share the parameters: fully_shard's changes to one reach the other.

        So Transformer Engine takes the layer for FSDP2's, and keeps no FP8 weights for the backward pass.
        """
        blocks = blocks_of(model)
        for block, layer, parts in zip(
            blocks, transformer_engine.layers(model), transformer_engine.blocks(model), strict=True
        ):
            transformer_engine.give(layer, *parts)
            block.transformer_layer = layer
            block.forward = layer.__call__
        norm = transformer_engine.last_norm(model)
        model.passes = model.passes._replace(body=functools.partial(transformer_engine.through, blocks, norm))
        super()._shard(model, multiplies_in)


class SharedLayers(_OfLayers, TP):
    """The layers' own tensor and sequence parallelism: a rank has (T / ranks, B, C) between them.

    It leaves gradients of whole parameters to its users: they are summed as in Megatron-LM.
    """

    def __init__(self) -> None:
        super().__init__(sequence_parallel=True)

    def divide(self, model: Any) -> None:
        super().divide(model)
        over = {"tp_group": self._group, "tp_size": self._group.size(), "set_parallel_mode": True}
        over |= {"sequence_parallel": True, "attn_input_format": "sbhd"}
        layers, norm = transformer_engine.layers(model, **over), transformer_engine.last_norm(model)
        model.passes = model.passes._replace(body=functools.partial(transformer_engine.body, layers, norm, dim=0))

    def _cut_vocabulary(self, model: Any, ranks: Ranks) -> None:
        """Cut the vocabulary as te-bench's own does, with the sequence as first dimension."""
        rows = len(model.tables().head.weight)
        super()._cut_vocabulary(model, ranks)
        first, forward = part_of(rows, self._group.rank(), ranks.size)[0], model.forward
        model.embed = lambda tokens: Division(ranks, "row").leave(_vocabulary.own_rows(model, first, tokens.T))
        model.forward = lambda tokens, targets: forward(tokens, targets.T)

    def gathered(self, model: Any, gather: str | None, tokens: int = 0) -> dict[str, tuple[int, int]]:
        """Count te-bench's tp's bytes: in FP8 rowwise and columnwise copies, with blocks' scales; the rest is alike."""
        sent = tokens * sum(
            layer.in_features if mode == "column" else layer.out_features for mode, layer in self._pairs
        )
        embedded = tokens * model.config.shape.hidden
        return {
            "uint8": (sent, COPIES * sent),
            "bfloat16": (2 * embedded, 2 * embedded),
            "float32": (0, 4 * embedded + COPIES * sent // SCALES),
        }


MODES = {"ddp": Replicated, "fsdp2": Sharded, "tp": SharedLayers}
