"""FP8 emulated in high precision: the yardstick of the checks.

Nothing here comes from te_bench's quantisers, GEMMs or Linear: a mistake in them must not be in their yardstick too.
"""

import functools
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.models import recipe as recipes

Rounded = Callable[..., Tensor]  # `_rounded` with its recipe and random numbers
FORMATS = {448.0: torch.float8_e4m3fn, 57344.0: torch.float8_e5m2}  # by their largest number


def emulate(
    model: nn.Module,
    recipe: recipes.Recipe,
    leave: Container[str] = (),
    *,
    seed: int,
    gradient_scale: float | None = None,
) -> None:
    """Make every nn.Linear of `model` but those named in `leave` multiply operands that are rounded to FP8 and back.

    seed: decides over stochastic rounding, whatever ran before in the process. gradient_scale: a fixed scale of
    grad_output; None takes it from the amax.
    """
    draws = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    rounded = functools.partial(_rounded, recipe=recipe, draws=draws)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in leave:
            forward = functools.partial(_forward, module, recipe, rounded, gradient_scale)
            module.forward = forward  # type: ignore[method-assign]


def _forward(
    module: nn.Linear, recipe: recipes.Recipe, rounded: Rounded, gradient_scale: float | None, x: Tensor
) -> Tensor:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    flat = x.to(dtype).flatten(0, -2)
    y = _Linear.apply(flat, module.weight, recipe, rounded, gradient_scale).view(*x.shape[:-1], -1)
    return y if module.bias is None else y + module.bias.to(dtype)


class _Linear(torch.autograd.Function):
    """x W^T and both its gradients. Each operand is rounded along the dimension that its GEMM contracts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: recipes.Recipe, rounded: Rounded, gradient_scale: float | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.rounded, ctx.gradient_scale = recipe, rounded, gradient_scale
        return rounded(x, "input") @ rounded(weight, "weight").to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), rounded = ctx.saved_tensors, ctx.rounded
        come = functools.partial(rounded, role="grad_output", given=ctx.gradient_scale)
        dx = come(dy) @ rounded(weight.t(), "weight").to(dy.dtype).t()
        if getattr(ctx.recipe, "bf16_wgrad", False):
            dw = dy.t() @ x
        else:
            dw = come(dy.t(), tokens=True) @ rounded(x.t(), "input", tokens=True).t()
        return dx, dw.to(weight.dtype), None, None, None


def _rounded(
    x: Tensor,
    role: str,
    recipe: recipes.Recipe,
    draws: torch.Generator,
    given: float | None = None,
    *,
    tokens: bool = False,
) -> Tensor:
    """Return x (M, K) after a trip through FP8; the GEMM contracts K.

    given: the scale; None takes it from the amax. tokens: K is tokens, and role no weight.
    """
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        return _rounded_to_nvfp4(x, role, recipe, draws, tokens)
    forward, backward = recipe.fp8_format.value  # not recipe.dtype(): the yardstick is to see its mistakes
    dtype = FORMATS[backward if role == "grad_output" else forward]
    rows, columns = x.shape
    square = role == "weight" and getattr(recipe, "enable_2d_quantization", False)
    high, wide = {
        "tensor": (rows, columns),
        "row": (1, columns),
        "block": (128 if role == "weight" else 1, 128),
        "mxfp8": (32 if square else 1, 32),
    }[recipe.granularity]
    padded = F.pad(x.float(), (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    scale = torch.finfo(dtype).max / blocks.abs().amax((1, 3), keepdim=True).double()
    if recipe.power_of_two:
        scale = scale.log2().floor().exp2()
    scale = (
        torch.where(scale.isfinite(), scale, 1.0).float() if given is None else torch.full_like(scale, given).float()
    )
    back = (blocks * scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float() / scale
    return back.view(padded.shape)[:rows, :columns].to(x.dtype)


def _rounded_to_nvfp4(
    x: Tensor, role: str, recipe: recipes.NVFP4BlockScaling, draws: torch.Generator, tokens: bool
) -> Tensor:
    """Return x (M, K) after a trip through NVFP4.

    Along tokens it is Hadamard-transformed, and their number padded to a multiple of 16.
    """
    (rows, columns), v = x.shape, x.double()
    if tokens and not recipe.disable_rht:
        columns = -(-columns // 16) * 16
        v = F.pad(v, (0, columns - v.shape[1])).unflatten(1, (-1, 16)) @ _hadamard(v.device)
        v = v.flatten(1).bfloat16().double()
    high = 16 if role == "weight" and not recipe.disable_2d_quantization else 1
    padded = F.pad(v, (0, -columns % 16, 0, -rows % high)).contiguous()
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // 16, 16)
    scale = 6 * 448 / blocks.abs().amax().clamp(min=1e-300)
    shared = (blocks.abs().amax((1, 3), keepdim=True) * scale / 6).clamp(max=448.0).to(torch.float8_e4m3fn).double()
    size = torch.where(shared > 0, blocks.abs() * scale / shared, 0.0).clamp(max=6.0)
    grid = size.new_tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    below = torch.bucketize(size, grid, right=True) - 1
    above = (below + 1).clamp(max=7)
    share = (size - grid[below]) / (grid[above] - grid[below]).clamp(min=0.5)  # of the way to the next one
    if role == "grad_output" and not recipe.disable_stochastic_rounding:
        up = share > torch.rand(size.shape, dtype=torch.float64, device=size.device, generator=draws)
    else:
        up = share > 0.5  # ties, which differ by nothing in size, apart
    back = torch.where(up, grid[above], grid[below]).copysign(blocks) * shared / scale
    return back.view(padded.shape)[:rows, :columns].to(x.dtype)


def _hadamard(device: torch.device) -> Tensor:
    """Return Transformer Engine's, (16, 16) float64, with its signs: orthogonal."""
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=torch.float64)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    four = torch.kron(two, two)
    return (signs[:, None] * torch.kron(four, four)).to(device)
