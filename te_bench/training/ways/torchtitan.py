"""torchtitan's: fully_shard with bf16 weights and float32 gradients; layers shared by DTensor; blocks and loss compiled.

There is no autocast. All weights are gathered in bf16, and the residual stream is bf16. Where ranks share layers, each
has a part of every sequence between them and computes the loss from its part of the logits. Query, key and value are
one GEMM, as torchtitan's fused ones: each rank's rows of the weight are consecutive. Two defaults of its llama3_8b are
left out because te-bench's own steps have neither: selective activation checkpointing and a chunked loss. Its own CUDA
graph ends with the backward pass; mode cudagraph captures the whole step, as te-bench's does.

Source: torchtitan of 2026-08-21, distributed/fsdp.py, distributed/cudagraph.py and components/loss.py; v0.2.2,
models/llama3/infra/parallelize.py.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from te_bench.kernels.linear_cross_entropy import IGNORED, Backend
from te_bench.models import dropout
from te_bench.models.checkpointing import blocks_of
from te_bench.models.parts import AttentionPart
from te_bench.training.parallel import Indivisible
from te_bench.training.parallel._shared_layers import plan
from te_bench.training.parallel._vocabulary import shared_entropy, without_padding
from te_bench.training.parallel.fsdp2 import FSDP2

Entropy = Callable[..., Tensor]


class Sharded(FSDP2):
    """fully_shard on embeddings, on each block, and on last norm and head together; a tied table joins all three."""

    casts = True

    def _shard(self, model: Any, multiplies_in: torch.dtype | None) -> None:
        self._entropy = self._loss_of(model)
        tables = model.tables()
        how: dict[str, Any] = {
            "mesh": self._mesh(),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=multiplies_in,
                reduce_dtype=None if multiplies_in is None else torch.float32,
                cast_forward_inputs=False,
            ),
        }
        last = [tables.norm, tables.head]
        if tables.head.weight is tables.tokens.weight:
            last.insert(0, tables.tokens)
        else:
            fully_shard(tables.tokens, **how)
        fully_shard(last, **how, reshard_after_forward=False)
        for block in blocks_of(model):
            fully_shard(block, **how)
        fully_shard(model, **how)

        def loss(x: Tensor, weight: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
            return self._entropy(tables.head(x), targets, vocab=vocab)

        head = Backend(forward=loss)
        model.heads = {True: head, False: head}

    def shares(self, parameter: nn.Parameter) -> bool:
        return True

    def _loss_of(self, model: Any) -> Entropy:
        return _entropy

    def gathered(self, model: nn.Module, gather: str | None, tokens: int = 0) -> dict[str, tuple[int, int]]:
        return {}  # weights are sent only in the dtype that fully_shard was given

    def forward(self, model: nn.Module, compiled: bool) -> Callable[..., Tensor]:
        if compiled:
            self._entropy = torch.compile(self._entropy, dynamic=False)
        return super().forward(model, compiled)


class SharedLayers(Sharded):
    """Tensor parallelism by DTensor: a rank has a part of each sequence between layers; fully_shard casts weights."""

    name = "tp"

    def __init__(self) -> None:
        super().__init__()
        self.replicas, self.replica = 1, 0
        self._both: Any = None  # a 2D mesh: one rank, which casts weights, by all ranks, which share layers
        self._rows: dict[nn.Module, Tensor] = {}  # a weight's rows in the order of the ranks

    def _mesh(self) -> DeviceMesh:
        mesh: DeviceMesh = self._both["weights"]
        return mesh

    def _shard(self, model: Any, multiplies_in: torch.dtype | None) -> None:
        if reason := self._indivisible(model):
            raise Indivisible(f"tp: {reason}; choose fsdp2")
        self._both = init_device_mesh(self.device.type, (1, self.world), mesh_dim_names=("weights", "layers"))
        layers, tables, tied = self._both["layers"], model.tables(), model.config.shape.tied
        norms = {id(m.weight): m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)}
        plans: list[tuple[nn.Module, Any]] = [
            (norms[id(part.norm.weight)], SequenceParallel()) for part in model.parts()
        ]
        for cut in plan(model)[0]:
            if cut.mode == "column":
                self._order(cut.layer, cut.pieces)
            plans.append((cut.layer, self._style(cut.layer, cut.mode)))
        whole = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False)
        plans += [
            (tables.tokens, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))),
            (tables.norm, SequenceParallel()),
            (tables.norm, whole),
            (tables.head, ColwiseParallel()),
        ]
        if tables.positions is not None:  # (T, C)
            plans.append((tables.positions, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))))
        for module, style in plans:
            parallelize_module(module, layers, style)
        # In a compiled block the gradient of a still asynchronous tensor is lost (torch 2.13.0).
        tables.tokens.register_forward_hook(lambda module, inputs, x: x.clone())
        if tied:
            model.tie()
        angles = model.angles
        model.angles = lambda length: angles(length * self.world)  # the caller's length is a rank's part of a sequence
        super()._shard(model, multiplies_in)

    def _style(self, layer: nn.Module, mode: str) -> Any:
        return ColwiseParallel(input_layouts=Shard(1)) if mode == "column" else RowwiseParallel(output_layouts=Shard(1))

    def _indivisible(self, model: Any) -> str | None:
        """Return why so many ranks cannot share the model's layers, or None."""
        attentions = [part for part in model.parts() if isinstance(part, AttentionPart)]
        if not attentions:
            return "the model does not say its parts"
        if any(part.q_norm is not None for part in attentions):
            return "norms of heads are no part of torchtitan's Llama"
        if rates := sorted({getattr(holder, name) for holder, name in dropout.rates(model)}):
            return f"dropout {rates[-1]} would hide the same of every rank's heads"
        sizes = [
            ("tokens of a sequence", model.config.shape.length),
            ("rows of the head", len(model.tables().head.weight)),
        ]
        for cut in plan(model)[0]:
            what = "features" if cut.unit == 1 else f"heads of {cut.unit} features"
            sizes += [(what, size // cut.unit) for size in cut.pieces]
        for what, size in sizes:
            if size % self.world:
                return f"the {size} {what} do not divide into {self.world} ranks"
        return None

    def _order(self, layer: Any, pieces: tuple[int, ...]) -> None:
        """Reorder the rows of stacked matrices so that each rank's rows are consecutive."""
        by_rank = zip(*(part.chunk(self.world) for part in torch.arange(sum(pieces)).split(pieces)), strict=True)
        rows = self._rows[layer] = torch.cat([part for own in by_rank for part in own]).to(self.device)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(parameter[rows])

    def _loss_of(self, model: Any) -> Entropy:
        group = self._both["layers"].get_group()
        first = group.rank() * len(model.tables().head.weight) // self.world

        def entropy(logits: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
            return shared_entropy(logits, targets, vocab, first, group)

        return entropy

    def whole(self, x: Tensor, of: nn.Parameter | None = None) -> Tensor:
        x = super().whole(x)
        for layer, rows in self._rows.items():
            if any(parameter is of for parameter in layer.parameters()):
                return x.index_select(0, rows.argsort())
        return x


def _entropy(logits: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
    """Compute cross-entropy with padding masked outside the logits: masked in them, they would become float32."""
    return F.cross_entropy(without_padding(logits, vocab), targets, ignore_index=IGNORED)


MODES = {"fsdp2": Sharded, "tp": SharedLayers}
