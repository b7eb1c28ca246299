"""Fused norms in Triton: forward, forward with the FP8 cast into both layouts in the same pass, backward.

norm/residual.py fuses the cast, for a stream without a branch. torch.compile sees two operators, whose CPU
implementation is the reference. Eager calls go straight to the launchers, because a custom operator costs the host
about 20 us a call.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.norm import Backend, Problem, check, kernels
from te_bench.kernels.norm import residual as stream
from te_bench.kernels.norm.backends import reference
from te_bench.kernels.operators import without_none
from te_bench.kernels.quantize.kernels import float32
from te_bench.kernels.tile import lacks_triton

LARGEST_N = 16384  # a row of the backward pass fills 32 warps' registers (and spills 252 bytes a thread)


def unsupported(p: Problem) -> str | None:
    if reason := lacks_triton(p.device) or (architecture.lacks_fp8(p.capability) if p.quantized else None):
        return reason
    if p.n > LARGEST_N:
        return f"hidden size {p.n} > {LARGEST_N}"
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
    """Compute y = (x - mean) * rstd * gamma + bias, mean, rstd; x (M, N) -> (M, N) in x's dtype, (M,), (M,) float32.

    rmsnorm has neither mean nor bias. Raises ValueError for shapes that do not fit and for a bias in rmsnorm.
    """
    check(x, weight, bias, kind)
    run = _forward_op if torch.compiler.is_compiling() else kernels.forward
    y, mean, rstd = run(x, weight, bias, eps, zero_centered_gamma, kind)
    return y, mean if kind == "layernorm" else None, rstd


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
    """Compute dx = rstd * (g - mean_N(g) - xhat * mean_N(g * xhat)) + residual with g = dy * gamma, dweight, dbias.

    dy, x, residual (M, N) -> (M, N) in x's dtype, (N,), (N,) in weight's; rmsnorm has no mean_N(g) and no dbias. Each
    program sums its share of the rows in order: the same in every run on the same GPU.
    """
    check(x, weight, None, kind)
    run = _backward_op if torch.compiler.is_compiling() else kernels.backward
    dx, dweight, dbias = run(dy, x, weight, mean, rstd, zero_centered_gamma, residual)
    return dx, dweight, dbias if kind == "layernorm" else None


forward_quantized = functools.partial(reference.forward_cast, stream.add_forward_quantized)


@torch.library.custom_op("te_bench::norm_forward", mutates_args=())
def _forward_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda:
        return without_none(x, *kernels.forward(x, weight, bias, eps, zero_centered_gamma, kind))
    options: dict[str, Any] = {"eps": eps, "zero_centered_gamma": zero_centered_gamma, "kind": kind}
    return without_none(x, *reference.forward(x, weight, bias, **options))


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool, kind: str) -> Any:
    mean = float32(x, x.shape[0]) if kind == "layernorm" else None
    return without_none(x, x.new_empty(x.shape), mean, float32(x, x.shape[0]))


@torch.library.custom_op("te_bench::norm_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    zero_centered_gamma: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda:
        dx, dweight, dbias = kernels.backward(dy, x, weight, mean, rstd, zero_centered_gamma, residual)
        # An operator may not return two views of one tensor.
        return without_none(x, dx, dweight, None if dbias is None else dbias.clone())
    options: dict[str, Any] = {"zero_centered_gamma": zero_centered_gamma, "residual": residual}
    kind = "rmsnorm" if mean is None else "layernorm"
    return without_none(x, *reference.backward(dy, x, weight, mean, rstd, kind=kind, **options))


@_backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, *_: Any) -> Any:
    dbias = None if mean is None else weight.new_empty(weight.shape)
    return without_none(x, x.new_empty(x.shape), weight.new_empty(weight.shape), dbias)


BACKEND = Backend(
    forward=forward,
    forward_quantized=forward_quantized,
    backward=backward,
    unsupported=unsupported,
    residual=stream.RESIDUAL,
)
