"""Every rank has a share of each matrix, its gradient and its moments: torch's fully_shard on each block and on the rest.

A block's matrices are gathered before its forward and its backward pass, in the dtype to which autocast would round them,
and their gradients scattered in float32; embedding and head, which is one table where it is tied, are gathered in their own.
Vectors are whole in every rank, and their gradients averaged as ddp's are: rounded they would be other weights. So a step is
one process's. After each micro-batch a rank has its share of the gradients.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from te_bench.training.parallel import Indivisible
from te_bench.training.parallel.ddp import DDP


class FSDP2(DDP):
    name = "fsdp2"

    def unsupported(self, *, precision: str, mode: str, optimizer: str | None, blocks: str | None) -> str | None:
        if blocks is not None:
            return "fused blocks pass by the modules that gather the weights; choose ddp, or blocks that are not fused"
        if optimizer is not None:
            return f"the optimizer {optimizer} updates whole parameters, and a rank has shares; choose ddp"
        if mode not in ("eager", "compile"):
            return f"no CUDA graph has the gathers of weights; choose mode eager or compile, not {mode}"
        if precision == "fp16":
            return "the gradient scaler sees one rank's shares alone; choose bf16"
        return None

    def prepare(self, model: nn.Module, multiplies_in: torch.dtype | None) -> None:
        super().prepare(model, multiplies_in)
        vectors: Any = {parameter for parameter in model.parameters() if parameter.dim() < 2}
        mesh = init_device_mesh(next(model.parameters()).device.type, (self.world,))
        policy = MixedPrecisionPolicy(
            param_dtype=multiplies_in,
            reduce_dtype=None if multiplies_in is None else torch.float32,
            cast_forward_inputs=False,
        )
        try:
            for block in _blocks(model):
                fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=vectors)
            fully_shard(model, mesh=mesh, ignored_params=vectors)
        except (NotImplementedError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())[:200]
            raise Indivisible(f"fsdp2: torch's fully_shard does not take this model ({said}); choose ddp") from error

    def compiled(self, model: nn.Module) -> Callable[..., Tensor]:
        """Block by block: weights are gathered between what is compiled."""
        blocks = _blocks(model)
        forwards = [torch.compile(block.forward, dynamic=False) for block in blocks]

        def forward(*inputs: Tensor) -> Tensor:
            for block, one in zip(blocks, forwards, strict=True):
                block.forward = one
            try:
                loss: Tensor = model(*inputs)
            finally:
                for block in blocks:
                    del block.forward
            return loss

        return forward

    def watch(self, holders: Iterable[nn.Parameter]) -> None:
        super().watch(holder for holder in holders if not isinstance(holder, DTensor))

    def reduce(self, holders: Iterable[nn.Parameter]) -> None:
        super().reduce(holder for holder in holders if not isinstance(holder, DTensor))

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """torch's own takes shares and whole ones apart alone."""
        held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        kinds = [[(p, g) for p, g in held if isinstance(g, DTensor) is shared] for shared in (True, False)]
        norms = [self.whole(get_total_norm([g for _, g in kind], foreach=True)) for kind in kinds if kind]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for kind in kinds:
            clip_grads_with_norm_([p for p, _ in kind], max_norm, norm, foreach=True)
        return norm

    def whole(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        with torch.no_grad():
            return x.full_tensor()


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The items of the outermost lists of modules, as every family keeps its layers; a block's own lists are part of it."""
    found: list[nn.Module] = []
    for child in model.children():
        item = isinstance(model, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        found += [child] if item else _blocks(child)
    return found


PARALLEL = FSDP2
