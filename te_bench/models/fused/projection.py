"""A Linear's GEMMs between fused kernels, in FP8 or in the activations' precision."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.gemm import half
from te_bench.kernels.quantize import TENSOR, Layout, Operand, Quantized
from te_bench.models.modules.fp8_module import Fp8Module
from te_bench.models.modules.gathered import turned
from te_bench.models.modules.gemms import Gemms, of_weight
from te_bench.models.modules.parameters import stack
from te_bench.models.recipe import Slot

Saved = tuple[Operand, Operand]  # (input, weight) as the backward pass reads them


class Stacked(torch.autograd.Function):
    """Stack weights (n, K) to (sum of n, K) of `dtype`; with dtype None without values, for when their FP8 is used."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype | None, *weights: Tensor) -> Tensor:
        ctx.sizes, ctx.dtypes = [len(w) for w in weights], [w.dtype for w in weights]
        shape = sum(ctx.sizes), weights[0].shape[1]
        if dtype is None:
            return weights[0].new_full((), math.nan).expand(shape)
        if all(w.dtype is dtype for w in weights):
            return stack(weights)
        made = weights[0].new_empty(shape, dtype=dtype)
        for part, w in zip(made.split(ctx.sizes), weights, strict=True):
            part.copy_(w)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(part.to(dtype) for part, dtype in zip(dw.split(ctx.sizes), ctx.dtypes, strict=True))


class Projection(NamedTuple):
    """A Linear's three GEMMs: in FP8 with the FP8 weight `w`, or, if gemms is None, in the activations' precision.

    An operand is Quantized; in the activations' precision, data and data_t are the same matrix.
    """

    gemms: Gemms | None
    w: Quantized | None

    @classmethod
    def of(
        cls,
        module: Fp8Module,
        weights: Sequence[Tensor],
        gemm: int,
        is_first_microbatch: bool | None,
        columnwise: bool,
        beside: Sequence[Any] = (),
    ) -> Self:
        """Return the GEMMs of a module's weight number `gemm` under the current autocast.

        is_first_microbatch as in te.Linear. columnwise: cast a weight in both layouts; otherwise dgrad transposes it.
        beside: te.Linears whose weights are stacked below the module's.
        """
        for other in beside:
            other.join(module)
        gemms = module.gemms(gemm)
        made_of = weights if beside else None
        w = module.quantized_weight(
            gemms, weights[0], gemm, is_first_microbatch, columnwise=columnwise, made_of=made_of
        )
        return cls(gemms, w)

    def operand(self, y: Tensor, role: str, columnwise: bool, column_sum: Tensor | None = None) -> Quantized:
        """Return y (M, K) as a GEMM operand; the sum over its rows is added to column_sum, (K,) float32."""
        if self.gemms is not None:
            return self.gemms.quantize(y, role, rowwise=True, columnwise=columnwise, column_sum=column_sum)
        if column_sum is not None:
            column_sum.add_(y.sum(0, dtype=torch.float32))
        return Quantized(y, None, y, None, Layout(y.dtype, TENSOR, None))

    def cast(self, role: str) -> Any:
        """Return the keyword arguments by which another kernel may cast the operand; None if it may not."""
        if self.gemms is None:
            return None
        cast = self.gemms.recipe.epilogue(role, getattr(self.gemms, role))
        return None if cast is None else cast._asdict()

    def forward(self, x: Quantized, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return x W^T + b, (M, K) -> (M, N)."""
        if self.gemms is None:
            return half.multiply(x.data, weight, bias)
        assert self.w is not None
        return self.gemms.fprop(x, self.w, dtype, bias)

    def saved(self, x: Quantized, weight: Tensor) -> Saved:
        """Return the (input, weight) operands to save for the backward pass."""
        if self.gemms is None:
            return x.by_rows(), Operand(weight, None, x.layout)
        assert self.w is not None
        # If the transpose is not made yet, it will have the same scale: that of the recipe's `epilogue`.
        x_t = x.by_rows()._replace(data=None) if x.data_t is None else x.by_columns()
        return x_t, of_weight(self.w)

    def again(self, y: Tensor, scale: Tensor) -> Any:
        """Return the transposed FP8 data of an input, cast again with the first cast's scale; records no amax."""
        assert self.gemms is not None
        return self.gemms.recipe.quantize(y, "input", Slot(scale), rowwise=False, columnwise=True).data_t

    def dgrad(self, g: Quantized, saved: Saved, dtype: torch.dtype) -> Tensor:
        if self.gemms is None:
            return g.data @ saved[1].data
        assert self.w is not None
        return self.gemms.dgrad(g, turned(saved[1]) if self.w.data_t is None else saved[1], dtype)

    def wgrad(self, g: Quantized, saved: Saved, dtype: torch.dtype) -> Tensor:
        return g.data.t() @ saved[0].data if self.gemms is None else self.gemms.wgrad(g, saved[0], dtype)

    def backward(self, g: Quantized, saved: Saved, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Tensor, Tensor]:
        """Return dx and dw in these dtypes."""
        return self.dgrad(g, saved, dtypes[0]), self.wgrad(g, saved, dtypes[1])
