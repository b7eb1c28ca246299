"""LayerNorm and RMSNorm in plain PyTorch, in float32. Runs anywhere.

Sources: Ba, Kiros, Hinton, arXiv:1607.06450; Zhang, Sennrich, arXiv:1910.07467.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.norm import Backend, Norm, Residual, check
from te_bench.kernels.quantize import Quantized
from te_bench.kernels.quantize.backends import reference as quantizer


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute y = (x - mean) * rstd * gamma + bias, mean, rstd; x (M, N) -> (M, N) in x's dtype, (M,), (M,) float32.

    rmsnorm has neither mean nor bias. Raises ValueError for shapes that do not fit and for a bias in rmsnorm.
    """
    y, mean, rstd = normalized(x, weight, bias, norm)
    return y.to(x.dtype), mean, rstd


def normalized(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute `forward` with y in float32, before it is rounded."""
    eps, zero_centered_gamma, kind = norm
    check(x, weight, bias, kind)
    centred = x.float()
    mean = None
    if kind == "layernorm":
        mean = centred.mean(1)
        centred = centred - mean[:, None]
    rstd = (centred.square().mean(1) + eps).sqrt().reciprocal()
    y = centred * rstd[:, None] * _gamma(weight, zero_centered_gamma)
    if bias is not None:
        y = y + bias.float()
    return y, mean, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, norm: Norm, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute dx = rstd * (g - mean_N(g) - xhat * mean_N(g * xhat)) + residual with g = dy * gamma, dweight, dbias.

    dy, x, residual (M, N) -> (M, N) in x's dtype, (N,), (N,) in weight's; rmsnorm has no mean_N(g) and no dbias.
    """
    _, zero_centered_gamma, kind = norm
    check(x, weight, None, kind)
    centred = x.float() if mean is None else x.float() - mean[:, None]
    xhat = centred * rstd[:, None]
    dy = dy.float()
    g = dy * _gamma(weight, zero_centered_gamma)
    dx = g - xhat * (g * xhat).mean(1, keepdim=True)
    if kind == "layernorm":
        dx = dx - g.mean(1, keepdim=True)
    dx = dx * rstd[:, None]
    if residual is not None:
        dx = dx + residual.float()
    dbias = dy.sum(0).to(weight.dtype) if kind == "layernorm" else None
    return dx.to(x.dtype), (dy * xhat).sum(0).to(weight.dtype), dbias


def add_forward(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    *,
    dtype: torch.dtype,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Compute total = x + branch (x's dtype), y = norm(total) in `dtype`, mean, rstd; amax = max(amax, max |y|)."""
    check(x, weight, bias, norm.kind, branch)
    total = _total(x, branch)
    y, mean, rstd = normalized(total, weight, bias, norm)
    y = y.to(dtype)
    _gather(amax, y)
    return total, y, mean, rstd


def add_forward_quantized(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    *,
    via: torch.dtype,
    statistics: tuple[Tensor | None, Tensor] | None = None,
    **cast: Any,
) -> tuple[Tensor, Quantized, Tensor | None, Tensor]:
    """Compute total, fp8(y * scale), mean, rstd: `add_forward` to `via`, quantised with options `cast`.

    statistics are computed again.
    """
    total, y, mean, rstd = add_forward(x, branch, weight, bias, norm, dtype=via)
    return total, quantizer.quantize(y, **cast), mean, rstd


def forward_cast(
    add_forward_quantized: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, **cast: Any
) -> tuple[Quantized, Tensor | None, Tensor]:
    """Compute fp8(y * scale) in the requested layouts, mean, rstd, by a stream's function without a branch.

    y is rounded to x's dtype first. Raises ValueError as `forward`.
    """
    _, packed, mean, rstd = add_forward_quantized(x, None, weight, bias, norm, via=x.dtype, **cast)
    return packed, mean, rstd


def backward_rounded(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    norm: Norm,
    *,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    biased: bool = True,
    amax: Tensor | None = None,
    column_sum: Tensor | None = None,
    branch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute dx, dx rounded to `dtype`, dweight, dbias: `backward`, then amax, column_sum of the rounded dx, in place.

    With a branch x is x + branch, rounded to x's dtype as add_forward's total.
    """
    check(x, weight, None, norm.kind, branch)
    dx, dweight, dbias = backward(dy, _total(x, branch), weight, mean, rstd, norm, residual)
    copy = dx.to(dtype)
    _gather(amax, copy)
    if column_sum is not None:
        column_sum.add_(copy.float().sum(0))
    # Under torch.compile on a CPU, two results must not be one tensor; they would be if dx has this dtype.
    return dx, copy.clone() if copy is dx else copy, dweight, dbias if biased else None


forward_quantized = functools.partial(forward_cast, add_forward_quantized)


def _total(x: Tensor, branch: Tensor | None) -> Tensor:
    return x if branch is None else (x.float() + branch.float()).to(x.dtype)


def _gather(amax: Tensor | None, y: Tensor) -> None:
    if amax is not None and y.numel():
        amax.copy_(torch.maximum(amax, y.detach().float().abs().amax()))


def _gamma(weight: Tensor, zero_centered_gamma: bool) -> Tensor:
    return weight.float() + 1 if zero_centered_gamma else weight.float()


RESIDUAL = Residual(
    add_forward=add_forward,
    add_forward_quantized=add_forward_quantized,
    backward_rounded=backward_rounded,
)
BACKEND = Backend(
    forward=forward,
    forward_quantized=forward_quantized,
    backward=backward,
    residual=RESIDUAL,
)
