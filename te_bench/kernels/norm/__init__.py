"""LayerNorm and RMSNorm rivals, one file each: functions on (M, N) tensors, forward and backward, without autograd.

layernorm: y = (x - mean) * rstd * gamma + bias; rmsnorm: y = x * rstd * gamma. gamma is `weight`, or 1 + weight with
zero_centered_gamma; rstd = 1 / sqrt(variance + eps), of x around its mean (layernorm) or around 0 (rmsnorm).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_bench import plugins

KINDS = ("layernorm", "rmsnorm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """x (M, N). `capability` is the GPU's compute capability, None on a CPU."""

    n: int
    dtype: str  # "fp32", "bf16", "fp16"
    kind: str  # one of KINDS
    quantized: bool  # forward_quantized is needed, too
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None


class Norm(NamedTuple):
    """The settings of a norm."""

    eps: float
    zero_centered_gamma: bool = False
    kind: str = "layernorm"  # one of KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """A norm in a residual stream: x (M, N) is the stream (float32 under autocast), branch (M, N) or None is added to
    it.

    add_forward(x, branch, weight, bias, norm, *, dtype, amax=None) -> total, y, mean, rstd: total = x + branch in x's
    dtype, x itself without a branch; y = norm(total) in `dtype`.
    add_forward_quantized(x, branch, weight, bias, norm, *, via, scale, dtype, rowwise, columnwise, amax=None,
    counts=None, statistics=None) -> total, Quantized, mean, rstd: y, rounded to `via`, then quantised by that scale.
    statistics: mean and rstd of the same x, without a branch, from an earlier call; gives the same bits.
    backward_rounded(dy, x, weight, mean, rstd, norm, *, dtype, residual=None, biased=True, amax=None, column_sum=None,
    branch=None) -> dx, dx rounded to `dtype`, dweight, dbias: as Backend's backward; x is the total or, if that was not
    saved, the stream to which branch is added again; dbias is None unless biased. amax and column_sum, (N,) float32,
    are of the rounded dx, the branch's gradient; its sum is the gradient of the branch's bias.
    """

    add_forward: Callable[..., Any]
    add_forward_quantized: Callable[..., Any]
    backward_rounded: Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One rival. x (M, N), rows contiguous; weight and bias (N,); rmsnorm has no bias, layernorm may have one.

    forward(x, weight, bias, norm) -> y, mean, rstd: y in x's dtype; mean and rstd (M,) float32, mean None in rmsnorm.
    forward_quantized(x, weight, bias, norm, *, scale, dtype, rowwise, columnwise, amax=None, counts=None) -> Quantized,
    mean, rstd: y, rounded to x's dtype, then quantised by that scale.
    backward(dy, x, weight, mean, rstd, norm, residual=None) -> dx, dweight, dbias: dx in x's dtype, plus residual (M,
    N), the gradient that bypassed the norm; dweight and dbias (None in rmsnorm), in weight's dtype, are float32 sums
    that are the same in every run.
    residual: the norm in a residual stream, fused with its neighbours; None if a backend has none.
    """

    forward: Callable[..., Any]
    forward_quantized: Callable[..., Any]
    backward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None] = lambda problem: None
    residual: Residual | None = None


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load


def check(x: Any, weight: Any, bias: Any, kind: str, branch: Any = None) -> None:
    """Raise ValueError unless x is (M, N), weight (N,), bias (N,) or None, as `kind` allows, and branch of x's shape."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: {' or '.join(KINDS)}")
    if branch is not None and branch.shape != x.shape:
        raise ValueError(f"branch {tuple(branch.shape)} of a stream {tuple(x.shape)}: it must be of the same shape")
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: x must be (M, N) and weight (N,)")
    if bias is not None and (kind == "rmsnorm" or bias.shape != weight.shape):
        raise ValueError(f"bias {tuple(bias.shape)} in a {kind}: layernorm takes one of weight's shape, rmsnorm none")
