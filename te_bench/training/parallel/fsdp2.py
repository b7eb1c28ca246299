"""Every rank has a share of each matrix, its gradient and its moments: torch's fully_shard on each block and on the rest.

A block's matrices are gathered before its forward and its backward pass, in the dtype to which autocast rounds them.
Their gradients are reduce-scattered in float32. Embedding and head are gathered in their own dtype. Vectors stay whole,
as rounding would change them; their gradients are averaged as in ddp. So a step computes what one process would. After
each micro-batch a rank has its share of the gradients.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from te_bench.models.checkpointing import blocks_of
from te_bench.models.decoder import Decoder
from te_bench.training.parallel import Indivisible, _fp8_gather
from te_bench.training.parallel._fp8_gather import Fp8Gather, Shard, linears
from te_bench.training.parallel._group import clip_by_kinds
from te_bench.training.parallel.ddp import DDP

PASSES = 2  # a block is gathered for its forward pass and again for its backward pass


class FSDP2(DDP):
    """FSDP2's sharding. gather "fp8" gathers the blocks' te.Linear weights in FP8 (_fp8_gather), others as usual."""

    name = "fsdp2"

    def __init__(self, gather: Literal["fp8"] | None = None) -> None:
        super().__init__()
        self.gather = gather
        self.shards = self.world  # how many shards each matrix has
        self._fp8: Fp8Gather | None = None

    @classmethod
    def refused(
        cls, *, precision: str, mode: str, optimizer: str | None, blocks: str | None, **gathers: Any
    ) -> str | None:
        gather, recipe = gathers.get("gather"), gathers.get("recipe")
        if blocks is not None:
            return "fused blocks pass by the modules that gather the weights; choose ddp, or blocks that are not fused"
        if optimizer is not None:
            return f"the optimizer {optimizer} updates whole parameters, and a rank has shares; choose ddp"
        if mode == "compile-reduce-overhead":
            return "torch.compile's own CUDA graphs have no gathers of weights; choose mode cudagraph, which has"
        if gather not in (None, "fp8"):
            return f"gather {gather}: fp8 is all there is beside the dtype of the products; leave it out"
        if gather is not None and (precision != "fp8" or mode != "eager"):
            return f"gather {gather}: it is for eager steps in FP8, not for {precision} in mode {mode}; leave it out"
        if precision == "fp16":
            return "the gradient scaler sees one rank's shares alone; choose bf16"
        return None if gather is None or recipe is None else _fp8_gather.refused(recipe)

    def unsupported(self, **kind: Any) -> str | None:
        return super().unsupported(**kind, gather=self.gather)

    def prepare(self, model: nn.Module, multiplies_in: torch.dtype | None) -> None:
        super().prepare(model, multiplies_in)
        try:
            self._shard(model, multiplies_in)
        except (NotImplementedError, TypeError, ValueError) as error:
            if isinstance(error, Indivisible):
                raise
            said = " ".join(str(error).split())[:200]
            raise Indivisible(
                f"{self.name}: torch's fully_shard does not take this model ({said}); choose ddp"
            ) from error
        model.register_forward_hook(_give_back)

    def _shard(self, model: nn.Module, multiplies_in: torch.dtype | None) -> None:
        """Shard the model's matrices, leaving this rank its share."""
        blocks = blocks_of(model)
        self._fp8 = None if self.gather is None else Fp8Gather(blocks, self.shards, self.largest)
        whole: Any = {parameter for parameter in model.parameters() if not self.shares(parameter)}
        mesh = self._mesh()
        policy = MixedPrecisionPolicy(
            param_dtype=multiplies_in,
            reduce_dtype=None if multiplies_in is None else torch.float32,
            cast_forward_inputs=False,
        )
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=whole)
        fully_shard(model, mesh=mesh, ignored_params=whole)
        if self._fp8 is not None:
            model.register_forward_pre_hook(self._fp8.begin, prepend=True)  # before any weight is gathered

    def shares(self, parameter: nn.Parameter) -> bool:
        """Return whether ranks share this parameter; otherwise it is whole in every rank."""
        return parameter.dim() > 1

    def _mesh(self) -> DeviceMesh:
        """Return the mesh of ranks over which fully_shard cuts."""
        return init_device_mesh(self.device.type, (self.world,))

    def forward(self, model: nn.Module, compiled: bool) -> Callable[..., Tensor]:
        """Compile each block, and a decoder's head and loss as one: weights are gathered between compiled regions.

        In eager mode autocast saves all logits in float32 for the backward pass; compiled, they keep their dtype.
        """
        if not compiled:
            return model
        made: list[tuple[nn.Module, str, Callable[..., Any]]] = [
            (block, "forward", torch.compile(block.forward, dynamic=False)) for block in blocks_of(model)
        ]
        if isinstance(model, Decoder) and model.heads is None:
            made.append((model, "loss", torch.compile(model.loss, dynamic=False)))

        def forward(*inputs: Tensor) -> Tensor:
            for owner, name, one in made:
                setattr(owner, name, one)
            try:
                loss: Tensor = model(*inputs)
            finally:
                for owner, name, _ in made:
                    delattr(owner, name)
            return loss

        return forward

    def gathered(self, model: nn.Module, gather: str | None, tokens: int = 0) -> dict[str, tuple[int, int]]:
        in_fp8: set[Any] = {layer.weight for layer in linears(blocks_of(model))} if gather else set()
        return self._block_bytes(model, in_fp8)

    def _block_bytes(self, model: nn.Module, in_fp8: Collection[nn.Parameter]) -> dict[str, tuple[int, int]]:
        """Count both passes' bytes. Blocks with FP8-gathered weights go as uint8, others as bf16; rows are padded."""
        by_dtype: Counter[str] = Counter()
        for block in blocks_of(model):
            sizes = {
                p: math.ceil(len(p) / self.shards) * self.shards * math.prod(p.shape[1:])
                for p in block.parameters()
                if self.shares(p)
            }
            one, two = (sum(n for p, n in sizes.items() if (p in in_fp8) is kind) for kind in (True, False))
            by_dtype["uint8" if one else "bfloat16"] += PASSES * (one + 2 * two)
        return {dtype: (nbytes, nbytes) for dtype, nbytes in by_dtype.items() if nbytes}

    def watch(self, holders: Iterable[nn.Parameter]) -> None:
        super().watch(holder for holder in holders if not isinstance(holder, DTensor))

    def reduce(self, holders: Iterable[nn.Parameter]) -> None:
        if self._fp8 is not None:
            self._fp8.end()
        super().reduce(holder for holder in holders if not isinstance(holder, DTensor))

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        return clip_by_kinds(
            parameters, max_norm, lambda _, g: isinstance(g, DTensor), lambda _, norm: self.whole(norm)
        )

    def whole(self, x: Tensor, of: nn.Parameter | None = None) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        with torch.no_grad():
            return x.full_tensor()

    def plain(self, x: Tensor, of: nn.Parameter | None = None) -> Tensor:
        if not isinstance(x, DTensor) or not isinstance(x._local_tensor, Shard):
            return x
        form: Any = {"run_check": False, "shape": x.shape, "stride": x.stride()}
        return DTensor.from_local(x._local_tensor.part, x.device_mesh, x.placements, **form)


def _give_back(model: nn.Module, *_: Any) -> None:
    """Reshard all weights after a pass without gradients: torch keeps the last gathered ones otherwise.

    Without this, a captured step's update stays unseen, and parameters read in between are the gathered ones.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


PARALLEL = FSDP2
