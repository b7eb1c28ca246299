"""Fused norms in Triton: forward, forward with the FP8 cast into both layouts in the same pass, backward.

A cast in passing is _residual's of a stream to which nothing is added. torch.compile sees two operators, whose CPU
implementation is the reference; eager calls go straight to the launchers, for a custom operator costs the host about 20 us
a call.
"""

import torch
import triton
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.norm import Backend, Problem, check, kernels
from te_bench.kernels.norm import residual as _residual
from te_bench.kernels.norm.backends import reference
from te_bench.kernels.quantize import Quantized

LARGEST_N = 16384  # a row of the backward fills the registers of 32 warps (and spills 252 bytes a thread)


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda" and not triton.knobs.runtime.interpret:
        return "needs an NVIDIA GPU (or TRITON_INTERPRET=1)"
    if p.quantized and (reason := architecture.lacks_fp8(p.capability)):
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
    """y = (x - mean) * rstd * gamma + bias, mean, rstd; x (M, N) -> (M, N) in x's dtype, (M,) and (M,) float32.

    rmsnorm has neither mean nor bias. Raises ValueError for shapes that do not fit and for a bias in rmsnorm.
    """
    check(x, weight, bias, kind)
    if torch.compiler.is_compiling():
        y, mean, rstd = _forward_op(x, weight, bias, eps, zero_centered_gamma, kind)
        return y, mean if kind == "layernorm" else None, rstd
    return kernels.forward(x, weight, bias, eps, zero_centered_gamma, kind)


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
    """fp8(y * scale) in the layouts asked for, mean, rstd, with y of `forward` rounded to x's dtype beforehand.

    amax, () float32, becomes max(amax, max |y|) and counts, (3,) int64, is added to. Raises ValueError as `forward`.
    """
    _, packed, mean, rstd = _residual.add_forward_quantized(
        x,
        None,
        weight,
        bias,
        eps=eps,
        via=x.dtype,
        scale=scale,
        dtype=dtype,
        rowwise=rowwise,
        columnwise=columnwise,
        zero_centered_gamma=zero_centered_gamma,
        kind=kind,
        amax=amax,
        counts=counts,
    )
    return packed, mean, rstd


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

    dy, x, residual (M, N) -> (M, N) in x's dtype, (N,), (N,) in weight's; rmsnorm has no mean_N(g) and no dbias. The sums
    over rows are of one share a program, in order: the same in every run on the same GPU.
    """
    check(x, weight, None, kind)
    if torch.compiler.is_compiling():
        dx, dweight, dbias = _backward_op(dy, x, weight, mean, rstd, zero_centered_gamma, residual)
        return dx, dweight, dbias if kind == "layernorm" else None
    return kernels.backward(dy, x, weight, mean, rstd, zero_centered_gamma, residual)


@torch.library.custom_op("te_bench::norm_forward", mutates_args=())
def _forward_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda:
        y, mean, rstd = kernels.forward(x, weight, bias, eps, zero_centered_gamma, kind)
    else:
        y, mean, rstd = reference.forward(x, weight, bias, eps=eps, zero_centered_gamma=zero_centered_gamma, kind=kind)
    return y, _or_empty(mean, rstd), rstd


@_forward_op.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    m = x.shape[0]
    mean = x.new_empty(m if kind == "layernorm" else 0, dtype=torch.float32)
    return x.new_empty(x.shape), mean, x.new_empty(m, dtype=torch.float32)


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
        dbias = dbias if dbias is None else dbias.clone()  # an operator may not return two views of one tensor
    else:
        kind = "rmsnorm" if mean is None else "layernorm"
        dx, dweight, dbias = reference.backward(
            dy, x, weight, mean, rstd, zero_centered_gamma=zero_centered_gamma, kind=kind, residual=residual
        )
    return dx, dweight, _or_empty(dbias, dweight)


@_backward_op.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    zero_centered_gamma: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(0 if mean is None else weight.shape)


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """The tensor, or an empty one of `like`'s dtype: an operator can't return None."""
    return like.new_empty(0) if tensor is None else tensor


BACKEND = Backend(
    forward=forward,
    forward_quantized=forward_quantized,
    backward=backward,
    unsupported=unsupported,
    residual=_residual.RESIDUAL,
)
