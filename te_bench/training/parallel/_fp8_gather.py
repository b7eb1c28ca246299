"""FSDP2 all-gathers of FP8 weights: each rank casts its shard with the whole weight's scale, and sends 1 byte an
element.

Shards, gradients and moments keep their dtypes. Scales are known before a gather: current scaling all-reduces all
amaxes once after each update; delayed scaling takes its recipe's state, whose amaxes all ranks share. So a gathered
weight is bitwise what one process casts. The backward pass uses its forward pass's scales.
Source: torchao, float8/fsdp_utils.py (precompute_float8_dynamic_scale_for_fsdp).
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from te_bench.kernels.gemm.backends.scaled_mm import SCALE_ALIGNMENT
from te_bench.kernels.quantize import Layout, Operand, Quantized
from te_bench.kernels.quantize.backends.reference import scale_from_amax
from te_bench.models import fp8
from te_bench.models.modules.gathered import Gathered
from te_bench.models.modules.linear import Linear
from te_bench.models.recipe import Recipe, Slot
from te_bench.training.parallel import Indivisible

aten = torch.ops.aten
#: Operators by which FSDP2 cuts a parameter and DTensor passes it on: applied to a Shard they return a Shard.
CUTS = frozenset(
    (
        *(aten.split.Tensor, aten.new_zeros.default, aten.new_empty.default, aten.slice.Tensor),
        *(aten.view.default, aten.as_strided.default, aten.detach.default, aten.alias.default),
    )
)


class Shard(Tensor):
    """A rank's shard of a weight, with FSDP2's all-gather hooks; any computation on it returns a plain tensor."""

    part: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Shard":
        form: Any = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made: Any = Tensor._make_wrapper_subclass(cls, inner.shape, device=inner.device, **form)
        made.part = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = tree_map_only(cls, lambda shard: shard.part, (args, kwargs or {}))
        made = operator(*given[0], **given[1])
        if operator._schema.is_mutable and args and isinstance(args[0], cls):
            return args[0]
        return tree_map_only(Tensor, cls, made) if operator in CUTS and isinstance(args[0], cls) else made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Shard({self.part!r})"

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: nn.Module, policy: Any) -> Any:
        return _gathers[module].cast(module, self.part)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        (data,), (scale_inv, layout) = outputs, metadata
        operand = Operand(data.view(layout.format), scale_inv, layout)
        if out is not None:
            out.refill(operand)
            return None
        return Gathered(operand, dtype), ()


def refused(recipe: Recipe) -> str | None:
    """Return why this recipe's weights cannot be gathered in FP8, or None."""
    name = type(recipe).__name__
    if not recipe.float8_per_tensor_scaling():
        return f"gather fp8: {name} has more than one scale a weight; choose per-tensor scaling, or leave it out"
    if recipe.bf16_wgrad:
        return "gather fp8: the recipe keeps wgrad out of FP8, and casts by no given scale; leave it out"
    if recipe.by_given_scale() is None:
        return f"gather fp8: {name} casts in a way of its own; leave it out"
    return None


class Fp8Gather:
    """The scales of weights gathered in FP8: those of the blocks' te.Linear whose weight has no other user."""

    def __init__(self, blocks: Sequence[nn.Module], world: int, largest: Callable[[Tensor], Tensor]) -> None:
        """Wrap the weights as Shard before fully_shard cuts them. Raises Indivisible unless rows divide evenly."""
        self.layers: list[Any] = linears(blocks)
        if not self.layers:
            raise Indivisible("gather fp8: the model's blocks have no te.Linear; choose an FP8 recipe, or leave it out")
        for layer in self.layers:
            weight: Any = layer.weight
            if weight.shape[0] % world:
                raise Indivisible(
                    f"gather fp8: a weight's {weight.shape[0]} rows do not divide into {world} ranks; leave it out"
                )
            layer.weight = nn.Parameter(Shard(weight.detach()), weight.requires_grad)
            _gathers[layer] = self
        self._largest = largest
        self._measured = False
        self._scales: Tensor = torch.empty(0)
        self._inverses: Tensor = torch.empty(0)
        self._cast: Recipe | None = None
        self._number = {layer: i for i, layer in enumerate(self.layers)}

    def end(self) -> None:
        """Call after a step's last backward pass: the weights may change, so the amaxes must be measured again."""
        self._measured = False

    def begin(self, *_: Any) -> None:
        """Set the scales before each forward pass. Raises ValueError if the model's autocast is not in FP8."""
        recipe = fp8.current.recipe
        if not fp8.current.enabled or recipe is None or fp8.current.calibrating:
            raise ValueError(
                "this step's weights are gathered in FP8, but the model's autocast is without: run it in the autocast of "
                "training, or make a step without gather"
            )
        if reason := refused(recipe):
            raise Indivisible(reason)
        self._cast = recipe.by_given_scale()
        slots = [layer.gemms().weight for layer in self.layers]
        shards = [layer.weight._local_tensor.part for layer in self.layers]
        self._scales = self._delayed(slots, shards) if recipe.delayed() else self._current(recipe, shards)
        # Only the first element of each row is used: cuBLASLt needs a scale's address to be a multiple of 16 bytes.
        self._inverses = self._scales.reciprocal()[:, None].expand(-1, SCALE_ALIGNMENT).contiguous()
        if fp8.current.numerics:
            for layer, slot, shard in zip(self.layers, slots, shards, strict=True):
                self._quantize(layer, shard, slot.counts)

    def _current(self, recipe: Recipe, shards: list[Tensor]) -> Tensor:
        if not self._measured:
            amaxes = self._largest(_amaxes(shards))
            self._scales = scale_from_amax(amaxes, recipe.dtype("weight"), recipe.power_of_two)
            self._measured = torch.is_grad_enabled()  # an evaluation's weights may be changed by others next
        return self._scales

    def _delayed(self, slots: list[Slot], shards: list[Tensor]) -> Tensor:
        recorded = [slot.amax for slot in slots if slot.amax is not None]
        if recorded:  # shared over the ranks when the forward pass ends
            torch._foreach_maximum_(recorded, list(_amaxes(shards).unbind()))
        return torch.stack([slot.scale for slot in slots if slot.scale is not None])

    def cast(self, layer: Any, shard: Tensor) -> tuple[tuple[Tensor], tuple[Tensor, Layout]]:
        """Return ((the FP8 shard as bytes, which every backend sends),) and (its inverse scale, its layout).

        FSDP2 calls this on its own stream. The scales were allocated on the forward pass's stream: memory of FSDP2's
        stream could be reused there before the forward pass has read it.
        """
        made = self._quantize(layer, shard, None)
        return (made.data.view(torch.uint8),), (self._inverses[self._number[layer], 0], made.layout)

    def _quantize(self, layer: Any, shard: Tensor, counts: Tensor | None) -> Quantized:
        assert self._cast is not None
        slot = Slot(self._scales[self._number[layer]], counts=counts)
        return self._cast.quantize(shard, "weight", slot, rowwise=True, columnwise=False)


def linears(blocks: Sequence[nn.Module]) -> list[Linear]:
    """Return the blocks' te.Linear whose weight has no other user, in an order that is the same in every rank."""
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for block in blocks:
        for module in block.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    users.setdefault(parameter, []).append(module)
    found = [(parameter, modules[0]) for parameter, modules in users.items() if len(modules) == 1]
    return [m for p, m in found if isinstance(m, Linear) and m._parameters.get("weight") is p]


def _amaxes(shards: list[Tensor]) -> Tensor:
    return torch.stack([norm.float() for norm in torch._foreach_norm(shards, torch.inf)])


_gathers: "weakref.WeakKeyDictionary[nn.Module, Fp8Gather]" = weakref.WeakKeyDictionary()
