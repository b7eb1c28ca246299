"""y = x W^T + b with the three GEMMs of training in FP8, as a recipe decides."""

from typing import Any

import torch
from torch import Tensor, nn

from te_bench.models.recipe import Recipe


class _Linear(torch.autograd.Function):
    """fprop y = x W^T, dgrad dx = dy W, wgrad dW = dy^T x; FP8 tensor cores read K-major operands, hence the transposes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
        x_fp8, w_fp8 = recipe.quantize(x, "input"), recipe.quantize(weight, "weight")
        ctx.save_for_backward(*x_fp8, *w_fp8)  # one byte an element instead of two or four
        ctx.recipe, ctx.dtypes = recipe, (x.dtype, weight.dtype)
        return recipe.gemm(x_fp8, w_fp8, "fprop", dtype)  # (M, K) (N, K) -> (M, N)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, x_inv, w, w_inv = ctx.saved_tensors
        recipe, (x_dtype, w_dtype) = ctx.recipe, ctx.dtypes
        g, g_inv = recipe.quantize(dy, "grad_output")
        dx = recipe.gemm((g, g_inv), (w.t().contiguous(), w_inv), "dgrad", x_dtype)  # (M, N) (K, N) -> (M, K)
        g_t, x_t = (g.t().contiguous(), g_inv), (x.t().contiguous(), x_inv)
        dw = recipe.gemm(g_t, x_t, "wgrad", torch.bfloat16 if w.is_cuda else torch.float32)  # (N, M) (K, M) -> (N, K)
        return dx, dw.to(w_dtype), None, None


class Linear(nn.Linear):
    """torch.nn.Linear whose GEMMs run in FP8 by `recipe`; parameters, initialisation and state dict are nn.Linear's.

    x (..., in_features) -> (..., out_features) in the autocast dtype. Hardware wants both features, and the product of
    the other dimensions in the backward pass, to be multiples of 16.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, recipe: Recipe):
        super().__init__(in_features, out_features, bias)
        self.recipe = recipe

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        x = x.to(dtype)
        y = _Linear.apply(x.reshape(-1, x.shape[-1]), self.weight, self.recipe, dtype)
        if self.bias is not None:
            y = y + self.bias.to(dtype)
        return y.view(*x.shape[:-1], -1)
