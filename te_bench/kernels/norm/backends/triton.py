"""Fused norms in Triton: forward, forward with the FP8 cast into both layouts in the same pass, backward.

norm/residual.py fuses the cast, for a stream without a branch. torch.compile sees two operators, whose CPU
implementation is the reference.
"""

import functools
from typing import Any

from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.norm import Backend, Norm, Problem, check, kernels
from te_bench.kernels.norm import residual as stream
from te_bench.kernels.norm.backends import reference
from te_bench.kernels.operators import operator
from te_bench.kernels.quantize.kernels import float32
from te_bench.kernels.tile import lacks_triton

LARGEST_N = 16384  # a row of the backward pass fills 32 warps' registers (and spills 252 bytes a thread)


def unsupported(p: Problem) -> str | None:
    if reason := lacks_triton(p.device) or (architecture.lacks_fp8(p.capability) if p.quantized else None):
        return reason
    if p.n > LARGEST_N:
        return f"hidden size {p.n} > {LARGEST_N}"
    return None


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute y = (x - mean) * rstd * gamma + bias, mean, rstd; x (M, N) -> (M, N) in x's dtype, (M,), (M,) float32.

    rmsnorm has neither mean nor bias. Raises ValueError for shapes that do not fit and for a bias in rmsnorm.
    """
    check(x, weight, bias, norm.kind)
    y, mean, rstd = _forward(x, weight, bias, *norm)
    return y, mean if norm.kind == "layernorm" else None, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, norm: Norm, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute dx = rstd * (g - mean_N(g) - xhat * mean_N(g * xhat)) + residual with g = dy * gamma, dweight, dbias.

    dy, x, residual (M, N) -> (M, N) in x's dtype, (N,), (N,) in weight's; rmsnorm has no mean_N(g) and no dbias. Each
    program sums its share of the rows in order: the same in every run on the same GPU.
    """
    check(x, weight, None, norm.kind)
    dx, dweight, dbias = _backward(dy, x, weight, mean, rstd, norm.zero_centered_gamma, residual)
    return dx, dweight, dbias if norm.kind == "layernorm" else None


forward_quantized = functools.partial(reference.forward_cast, stream.add_forward_quantized)


def _forward_by_reference(x: Tensor, weight: Tensor, bias: Tensor | None, **norm: Any) -> Any:
    return reference.forward(x, weight, bias, Norm(**norm))


def _backward_by_reference(zero_centered_gamma: bool, **given: Any) -> Any:
    kind = "rmsnorm" if given["mean"] is None else "layernorm"
    return reference.backward(norm=Norm(0.0, zero_centered_gamma, kind), **given)


def _fake_forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, kind: str) -> Any:
    return x.new_empty(x.shape), float32(x, x.shape[0]) if kind == "layernorm" else None, float32(x, x.shape[0])


def _fake_backward(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, *_: Any) -> Any:
    dbias = None if mean is None else weight.new_empty(weight.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


_forward = operator("norm_forward", kernels.forward, _fake_forward, plain=_forward_by_reference)
_backward = operator("norm_backward", kernels.backward, _fake_backward, plain=_backward_by_reference)

BACKEND = Backend(
    forward=forward,
    forward_quantized=forward_quantized,
    backward=backward,
    unsupported=unsupported,
    residual=stream.RESIDUAL,
)
