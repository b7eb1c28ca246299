"""The GEMMs of a weight under a recipe, and what a forward pass keeps of their operands for the backward pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_bench.kernels.quantize import Operand, Quantized
from te_bench.models.recipe import Recipe, Slot


class Gemms(NamedTuple):
    """The three GEMMs of one weight (N, K) under a recipe, for x (M, K): fprop x W^T, dgrad dy W, wgrad dy^T x."""

    recipe: Recipe
    input: Slot
    weight: Slot
    grad_output: Slot

    def quantize(
        self, x: Tensor, role: str, *, rowwise: bool, columnwise: bool, column_sum: Tensor | None = None
    ) -> Quantized:
        slot = getattr(self, role)
        return self.recipe.quantize(x, role, slot, rowwise=rowwise, columnwise=columnwise, column_sum=column_sum)

    def fprop(self, x: Quantized, w: Quantized, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return self.recipe.gemm(x.by_rows(), w.by_rows(), "fprop", dtype, bias)

    def dgrad(self, g: Quantized, w_t: Operand, dtype: torch.dtype) -> Tensor:
        return self.recipe.gemm(g.by_rows(), w_t, "dgrad", dtype)

    def wgrad(self, g: Quantized, x_t: Operand, dtype: torch.dtype) -> Tensor:
        return self.recipe.gemm(g.by_columns(), x_t, "wgrad", dtype)


NOT_NEEDED = Operand(None, None, None)  # type: ignore[arg-type]  # in a backward pass


def save_for_backward(ctx: Any, tensors: Sequence[Tensor | None], operands: Sequence[Operand]) -> None:
    """Keep tensors and operands in an autograd.Function's context; NOT_NEEDED takes the place of one that is not."""
    ctx.save_for_backward(*tensors, *[part for operand in operands for part in operand[:2]])
    ctx.layouts = [operand.layout for operand in operands]


def restore(ctx: Any) -> tuple[list[Any], list[Operand]]:
    """What `save_for_backward` kept."""
    found, layouts = list(ctx.saved_tensors), ctx.layouts
    start = len(found) - 2 * len(layouts)
    parts = found[start:]
    operands = [Operand(parts[2 * i], parts[2 * i + 1], layout) for i, layout in enumerate(layouts)]
    return found[:start], operands
