"""A norm in a residual stream, in Triton: addition, norm, rounding and cast in one kernel, of wide rows in two;
the backward casts in another.

torch.compile sees two operators, whose CPU implementation is the reference; eager calls go straight to the launchers.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.norm import (
    Residual,
    check,
    check_stream,
    residual_backward,
    residual_forward,
)
from te_bench.kernels.norm.backends import reference
from te_bench.kernels.quantize import TENSOR, Layout, Quantized, check_layouts
from te_bench.kernels.quantize.backends import triton as quantizer


def add_forward(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    zero_centered_gamma: bool = False,
    kind: str = "layernorm",
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """total = x + branch in x's dtype (x itself without a branch), y = norm(total) in `dtype`, mean, rstd.

    x, branch (M, N); statistics as `forward`'s. amax, () float32, becomes max(amax, max |y|). Raises ValueError as
    `forward`, and for a branch of another shape.
    """
    check(x, weight, bias, kind)
    check_stream(x, branch)
    run = _add_forward_op if torch.compiler.is_compiling() else residual_forward.add_forward
    settings = (eps, zero_centered_gamma, kind, dtype)
    total, y, _, _, _, mean, rstd = run(x, branch, weight, bias, *settings, *NO_CAST, amax, None)
    assert y is not None
    return x if branch is None else total, y, mean if kind == "layernorm" else None, rstd


def add_forward_quantized(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    via: torch.dtype,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    zero_centered_gamma: bool = False,
    kind: str = "layernorm",
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Quantized, Tensor | None, Tensor]:
    """total, fp8(y * scale) in the layouts asked for, mean, rstd, with y of `add_forward` rounded to `via` beforehand.

    amax, () float32, becomes max(amax, max |y|) and counts, (3,) int64, is added to. Raises ValueError as `add_forward`.
    """
    check(x, weight, bias, kind)
    check_stream(x, branch)
    check_layouts(rowwise, columnwise)
    settings = (eps, zero_centered_gamma, kind, via)
    if via is torch.float32 or (columnwise and x.shape[0] % 2 == 1):  # see quantizer.miscompiled; pairs of rows
        options: dict[str, Any] = {"eps": eps, "dtype": via, "zero_centered_gamma": zero_centered_gamma, "kind": kind}
        total, y, mean, rstd = add_forward(x, branch, weight, bias, **options)
        packed = quantizer.scaled(y, scale, dtype, rowwise=rowwise, columnwise=columnwise, amax=amax, counts=counts)
        return total, packed, mean, rstd
    run = _add_forward_op if torch.compiler.is_compiling() else residual_forward.add_forward
    total, _, data, data_t, inverse, mean, rstd = run(
        x, branch, weight, bias, *settings, scale, dtype, rowwise, columnwise, amax, counts
    )
    packed = quantizer.wrap(
        rowwise, columnwise, data, data_t, inverse, inverse, layout=Layout(dtype, TENSOR, torch.float32)
    )
    return x if branch is None else total, packed, mean if kind == "layernorm" else None, rstd


def backward_rounded(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    dtype: torch.dtype,
    zero_centered_gamma: bool = False,
    kind: str = "layernorm",
    residual: Tensor | None = None,
    biased: bool = True,
    amax: Tensor | None = None,
    column_sum: Tensor | None = None,
    branch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dx as `backward`'s, dx rounded to `dtype`, dweight, dbias; of x + branch, rounded to x's dtype, where there is one.

    Of what was rounded amax, () float32, becomes the largest magnitude if that is larger, and column_sum, (N,) float32, is
    added the sum over rows. Sums over rows are the same in every run on the same GPU.
    """
    check(x, weight, None, kind)
    check_stream(x, branch)
    run = _backward_op if torch.compiler.is_compiling() else residual_backward.backward_rounded
    both = biased and mean is not None
    dx, copy, sums = run(
        dy, x, weight, mean, rstd, zero_centered_gamma, residual, both, dtype, amax, column_sum, branch
    )
    return dx, copy, *_parameters(sums, weight)


backward_quantized = functools.partial(reference.backward_cast, backward_rounded, quantizer.scaled)
NO_CAST = (None, None, False, False)


def _parameters(sums: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    dweight, *dbias = sums.to(weight.dtype).unbind(0)
    return dweight, dbias[0] if dbias else None


@torch.library.custom_op("te_bench::norm_add_forward", mutates_args=("amax", "counts"))
def _add_forward_op(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    kind: str,
    out_dtype: torch.dtype,
    scale: Tensor | None,
    target: torch.dtype | None,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if x.is_cuda:
        total, *made = residual_forward.add_forward(
            *(x, branch, weight, bias, eps, zero_centered_gamma, kind, out_dtype),
            *(scale, target, rowwise, columnwise, amax, counts),
        )
    else:
        shared: dict[str, Any] = {"eps": eps, "zero_centered_gamma": zero_centered_gamma, "kind": kind, "amax": amax}
        if target is None:
            total, y, *statistics = reference.add_forward(x, branch, weight, bias, dtype=out_dtype, **shared)
            made = [y, None, None, None, *statistics]
        else:
            cast: dict[str, Any] = {
                "scale": scale,
                "dtype": target,
                "rowwise": rowwise,
                "columnwise": columnwise,
                "counts": counts,
            }
            total, q, *statistics = reference.add_forward_quantized(
                x, branch, weight, bias, via=out_dtype, **cast, **shared
            )
            made = [None, q.data, q.data_t, q.scale_inv if rowwise else q.scale_inv_t, *statistics]
    # An operator returns no input of its own.
    return _there(x, None if branch is None else total, *made)  # type: ignore[return-value]


@_add_forward_op.register_fake
def _(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    kind: str,
    out_dtype: torch.dtype,
    scale: Tensor | None,
    target: torch.dtype | None,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    m = x.shape[0]
    total = None if branch is None else x.new_empty(x.shape)
    mean = x.new_empty(m, dtype=torch.float32) if kind == "layernorm" else None
    made = _fake(x, out_dtype, target, rowwise, columnwise)
    return _there(x, total, *made, mean, x.new_empty(m, dtype=torch.float32))  # type: ignore[return-value]


@torch.library.custom_op("te_bench::norm_backward_rounded", mutates_args=("amax", "column_sum"))
def _backward_op(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    zero_centered_gamma: bool,
    residual: Tensor | None,
    biased: bool,
    out_dtype: torch.dtype,
    amax: Tensor | None,
    column_sum: Tensor | None,
    branch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda:
        return residual_backward.backward_rounded(
            dy, x, weight, mean, rstd, zero_centered_gamma, residual, biased, out_dtype, amax, column_sum, branch
        )
    options: dict[str, Any] = {
        "zero_centered_gamma": zero_centered_gamma,
        "kind": "rmsnorm" if mean is None else "layernorm",
        "residual": residual,
        "biased": biased,
        "amax": amax,
        "column_sum": column_sum,
        "branch": branch,
    }
    dx, copy, *sums = reference.backward_rounded(dy, x, weight, mean, rstd, dtype=out_dtype, **options)
    return dx, copy, torch.stack([s.float() for s in sums if s is not None])


@_backward_op.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    zero_centered_gamma: bool,
    residual: Tensor | None,
    biased: bool,
    out_dtype: torch.dtype,
    amax: Tensor | None,
    column_sum: Tensor | None,
    branch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = x.new_empty((1 + biased, x.shape[1]), dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=out_dtype), sums


def _fake(
    x: Tensor, out_dtype: torch.dtype, target: torch.dtype | None, rowwise: bool, columnwise: bool
) -> tuple[Tensor | None, ...]:
    """y, data, data_t and scale_inv."""
    m, n = x.shape
    if target is None:
        return x.new_empty((m, n), dtype=out_dtype), None, None, None
    data = x.new_empty((m, n), dtype=target) if rowwise else None
    data_t = x.new_empty((n, m), dtype=target) if columnwise else None
    return None, data, data_t, x.new_empty((), dtype=torch.float32)


def _there(like: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors, an empty one in place of None, which an operator can't return."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


RESIDUAL = Residual(
    add_forward=add_forward,
    add_forward_quantized=add_forward_quantized,
    backward_rounded=backward_rounded,
    backward_quantized=backward_quantized,
)
