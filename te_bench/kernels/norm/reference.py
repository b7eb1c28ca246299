"""LayerNorm and RMSNorm in plain PyTorch, in float32. Runs anywhere.

Sources: Ba, Kiros, Hinton, arXiv:1607.06450; Zhang, Sennrich, arXiv:1910.07467.
"""

import torch
from torch import Tensor

from te_bench.kernels.norm import Backend, Problem, check
from te_bench.kernels.quantize import Quantized, reference


def unsupported(p: Problem) -> str | None:
    return None


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    zero_centered_gamma: bool = False,
    kind: str = "layernorm",
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y = (x - mean) * rstd * gamma + bias, mean, rstd; x (M, N) -> (M, N) in x's dtype, (M,) and (M,) float32.

    rmsnorm has neither mean nor bias. Raises ValueError for shapes that do not fit and for a bias in rmsnorm.
    """
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
    return y.to(x.dtype), mean, rstd


def forward_quantized(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    zero_centered_gamma: bool = False,
    kind: str = "layernorm",
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Quantized, Tensor | None, Tensor]:
    """fp8(y * scale) in the layouts asked for, mean, rstd: `forward`, then quantize's `scaled`."""
    y, mean, rstd = forward(x, weight, bias, eps=eps, zero_centered_gamma=zero_centered_gamma, kind=kind)
    quantized = reference.BACKEND.scaled(
        y, scale, dtype, rowwise=rowwise, columnwise=columnwise, amax=amax, counts=counts
    )
    return quantized, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    zero_centered_gamma: bool = False,
    kind: str = "layernorm",
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx = rstd * (g - mean_N(g) - xhat * mean_N(g * xhat)) + residual with g = dy * gamma, dweight, dbias.

    dy, x, residual (M, N) -> (M, N) in x's dtype, (N,), (N,) in weight's; rmsnorm has no mean_N(g) and no dbias.
    """
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


def _gamma(weight: Tensor, zero_centered_gamma: bool) -> Tensor:
    return weight.float() + 1 if zero_centered_gamma else weight.float()


BACKEND = Backend(forward=forward, forward_quantized=forward_quantized, backward=backward, unsupported=unsupported)
