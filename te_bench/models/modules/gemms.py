"""A weight's GEMMs under a recipe, and saving their operands for the backward pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_bench.kernels.quantize import Operand, Quantized
from te_bench.kernels.quantize.backends.reference import scale_from_amax
from te_bench.models.modules import symmetric
from te_bench.models.modules.gathered import NOT_TURNED, turned
from te_bench.models.modules.tensor_parallel import Division
from te_bench.models.recipe import Recipe, Slot


class Gemms(NamedTuple):
    """The three GEMMs of one weight (N, K) under a recipe, for x (M, K): fprop x W^T, dgrad dy W, wgrad dy^T x.

    For a weight divided among ranks they include the collectives: `quantize` takes a rank's rows and returns all
    ranks', fprop and dgrad return a rank's part of the sum.
    """

    recipe: Recipe
    input: Slot
    weight: Slot
    grad_output: Slot
    divided: Division | None = None

    def gathers(self, role: str) -> bool:
        return self.divided is not None and self.divided.gathers(role)

    def quantize(
        self, x: Tensor, role: str, *, rowwise: bool, columnwise: bool, column_sum: Tensor | None = None
    ) -> Quantized:
        """Quantise x; the sum of its own rows is added to column_sum."""
        slot, recipe = getattr(self, role), self.recipe
        options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise}
        if not self.gathers(role):
            return recipe.quantize(x, role, slot, **options, column_sum=column_sum)
        assert self.divided is not None
        cast = recipe.by_given_scale()
        if cast is None:
            if column_sum is not None:
                column_sum += x.sum(0, dtype=torch.float32)
            return recipe.quantize(self.divided.ranks.gather(x), role, slot, **options)
        if not recipe.delayed():
            scale = scale_from_amax(self.divided.ranks.amax(x), recipe.dtype(role), recipe.power_of_two)
            slot = Slot(scale, counts=slot.counts)
        own = cast.quantize(x, role, slot, rowwise=True, columnwise=False, column_sum=column_sum)
        if rowwise and self._symmetric() is not None:  # the next GEMM gathers it
            return own._replace(data_t=own.data, scale_inv_t=own.scale_inv)
        return self.gather(own, role, columnwise)

    def _symmetric(self) -> str | None:
        """Return the group's name if a GEMM and its collective are one operator of symmetric memory, else None."""
        group = None if self.divided is None else self.divided.ranks.symmetric
        return None if group is None or self.recipe.by_given_scale() is None else group

    def gather(self, own: Quantized, role: str, columnwise: bool) -> Quantized:
        """Gather all ranks' FP8 rows, cast with one scale. An input's columns are left to wgrad, which regathers."""
        assert self.divided is not None
        rows = self.divided.ranks.gather_operand(own.by_rows())
        columns = own.by_rows() if role == "input" else turned(rows)
        whole = own._replace(data=rows.data)
        return whole._replace(data_t=columns.data, scale_inv_t=columns.scale_inv) if columnwise else whole

    def quantize_pair(
        self, x: Tensor, weight: Tensor, *, x_columnwise: bool, w_columnwise: bool
    ) -> tuple[Quantized, Quantized]:
        if self.gathers("input"):
            return (
                self.quantize(x, "input", rowwise=True, columnwise=x_columnwise),
                self.quantize(weight, "weight", rowwise=True, columnwise=w_columnwise),
            )
        options = {"x_columnwise": x_columnwise, "w_columnwise": w_columnwise}
        return self.recipe.quantize_pair(x, self.input, weight, self.weight, **options)

    def fprop(self, x: Quantized, w: Quantized, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        if (group := self._symmetric()) is not None:
            how = (x.by_rows(), w.by_rows(), dtype, True, group)
            y = symmetric.gather_matmul_fp8(*how)[1] if self.gathers("input") else symmetric.matmul_scatter_fp8(*how)
            return y if bias is None else y + bias.to(dtype)
        if self.divided is None or self.divided.mode == "column":
            return self.recipe.gemm(x.by_rows(), w.by_rows(), "fprop", dtype, bias)
        y = self.divided.summed(self.recipe.gemm(x.by_rows(), w.by_rows(), "fprop", dtype), "fprop")
        return y if bias is None else y + bias.to(dtype)

    def dgrad(self, g: Quantized, w_t: Operand, dtype: torch.dtype) -> Tensor:
        dx = self.recipe.gemm(g.by_rows(), w_t, "dgrad", dtype)
        return dx if self.divided is None else self.divided.summed(dx, "dgrad")

    def dgrad_and_gather(
        self, g: Quantized, w_t: Operand, dtype: torch.dtype, columnwise: bool
    ) -> tuple[Tensor, Quantized]:
        """Return dgrad and g as wgrad reads it; with symmetric memory one operator also gathers a row Linear's g."""
        group = self._symmetric()
        if group is None:
            return self.dgrad(g, w_t, dtype), g
        if not self.gathers("grad_output"):
            return symmetric.matmul_scatter_fp8(g.by_rows(), w_t, dtype, False, group), g
        data, dx = symmetric.gather_matmul_fp8(g.by_rows(), w_t, dtype, False, group)
        columns = turned(g.by_rows()._replace(data=data)) if columnwise else NOT_TURNED
        return dx, g._replace(data_t=columns.data, scale_inv_t=columns.scale_inv)

    def wgrad(self, g: Quantized, x_t: Operand, dtype: torch.dtype) -> Tensor:
        if self.gathers("input") and self.recipe.by_given_scale() is not None:
            assert self.divided is not None
            x_t = turned(self.divided.ranks.gather_operand(x_t))
        return self.recipe.gemm(g.by_columns(), x_t, "wgrad", dtype)


def of_weight(w: Quantized) -> Operand:
    """Return what the backward pass saves of a weight: its columns, or else its rows, to be transposed then."""
    return w.by_rows() if w.data_t is None else w.by_columns()


NOT_NEEDED = Operand(None, None, None)  # type: ignore[arg-type]  # in a backward pass


def save_for_backward(ctx: Any, tensors: Sequence[Tensor | None], operands: Sequence[Operand]) -> None:
    """Save tensors and operands in an autograd.Function's context; NOT_NEEDED replaces an unneeded operand."""
    ctx.save_for_backward(*tensors, *[part for operand in operands for part in operand[:2]])
    ctx.layouts = [operand.layout for operand in operands]


def restore(ctx: Any) -> tuple[list[Any], list[Operand]]:
    """Return the tensors and operands that `save_for_backward` saved."""
    found, layouts = list(ctx.saved_tensors), ctx.layouts
    start = len(found) - 2 * len(layouts)
    parts = found[start:]
    operands = [Operand(parts[2 * i], parts[2 * i + 1], layout) for i, layout in enumerate(layouts)]
    return found[:start], operands
