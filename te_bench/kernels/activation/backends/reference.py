"""Activations in plain PyTorch, in float32, forward in float64 too. Runs anywhere.

Sources: Hendrycks, Gimpel, arXiv:1606.08415 (gelu); Shazeer, arXiv:2002.05202 (the gated kinds); So et al.,
arXiv:2109.08668 (srelu).
"""

import math
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.activation import KINDS, Backend, width
from te_bench.kernels.quantize import Quantized
from te_bench.kernels.quantize.backends import reference as quantizer

GELU = math.sqrt(8 / math.pi), 0.044715  # gelu(x) = x * sigmoid(a * (x + b * x^3))
QGELU = 1.702


def forward(x: Tensor, kind: str) -> Tensor:
    """Compute y = f(x), or f(x[:, :F]) * x[:, F:] for a gated kind; x (M, F) or (M, 2F) -> (M, F) in x's dtype.

    Raises ValueError for an unknown kind, and for an odd width with a gated one.
    """
    f = width(x, kind)
    name, gated = KINDS[kind]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y, _ = _value_and_slope(wide[:, :f], name)
    return (y * wide[:, f:] if gated else y).to(x.dtype)


def backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """Compute dx = dy * f'(x), gated [dy * x[:, F:] * f'(x[:, :F]), dy * f(x[:, :F])], with x's shape and dtype."""
    f = width(x, kind, dy)
    name, gated = KINDS[kind]
    value, slope = _value_and_slope(x[:, :f].float(), name)
    dy = dy.float()
    if not gated:
        return (dy * slope).to(x.dtype)
    return torch.cat([dy * x[:, f:].float() * slope, dy * value], 1).to(x.dtype)


def forward_quantized(x: Tensor, kind: str, **cast: Any) -> Quantized:
    """Compute fp8(y * scale): `forward`, quantised with the options `cast`."""
    return quantizer.quantize(forward(x, kind), **cast)


def backward_quantized(dy: Tensor, x: Tensor, kind: str, **cast: Any) -> Quantized:
    """Compute fp8(dx * scale): `backward`, quantised with the options `cast`."""
    return quantizer.quantize(backward(dy, x, kind), **cast)


def _value_and_slope(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if name == "relu":
        return x.relu(), (x > 0).to(x.dtype)
    if name == "srelu":
        return x.relu().square(), 2 * x.relu()
    if name == "gelu_erf":
        cdf = torch.special.erfc(-x * math.sqrt(0.5)) / 2  # 1 + erf would cancel below 0
        return x * cdf, cdf + x * torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    if name == "gelu":
        a, b = GELU
        argument, inner = a * (x + b * x**3), a * (1 + 3 * b * x.square())
    else:
        factor = QGELU if name == "qgelu" else 1.0
        argument, inner = factor * x, torch.full_like(x, factor)
    s = argument.sigmoid()
    flat = s * (1 - s)
    if name == "sigmoid":
        return s, flat
    # Where the logistic function is flat, x * inner may have overflowed; 0 x infinity would be NaN.
    return x * s, torch.where(flat == 0, s, s + x * flat * inner)


BACKEND = Backend(
    forward=forward,
    forward_quantized=forward_quantized,
    backward=backward,
    backward_quantized=backward_quantized,
)
