"""A norm in a residual stream, in Triton: addition, norm, rounding and cast in one kernel (wide rows: two).

torch.compile sees two operators, whose CPU implementation is the reference.
"""

from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.norm import Norm, Residual, check, residual_backward, residual_forward
from te_bench.kernels.norm.backends import reference
from te_bench.kernels.operators import operator, takes_two_steps
from te_bench.kernels.quantize import Quantized, check_layouts
from te_bench.kernels.quantize.backends import reference as reference_quantizer
from te_bench.kernels.quantize.backends import triton as quantizer
from te_bench.kernels.quantize.kernels import float32
from te_bench.kernels.tile import empty_pair


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
    """Compute total = x + branch in x's dtype (x itself without a branch), y = norm(total) in `dtype`, mean, rstd.

    x, branch (M, N); statistics as in `forward`. amax, () float32, becomes max(amax, max |y|). Raises ValueError as
    `forward`, and for a branch of another shape.
    """
    check(x, weight, bias, norm.kind, branch)
    total, y, _, _, _, mean, rstd = _add_forward(x, branch, weight, bias, *norm, dtype, amax=amax)
    assert y is not None
    return x if branch is None else total, y, mean if norm.kind == "layernorm" else None, rstd


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
    """Compute total, fp8(y * scale) in the requested layouts, mean, rstd; `add_forward`'s y is rounded to `via` first.

    cast: scale, dtype, rowwise, columnwise, amax, counts; statistics: see Residual. Raises ValueError as `add_forward`.
    """
    check(x, weight, bias, norm.kind, branch)
    rowwise, columnwise, dtype = (cast[name] for name in ("rowwise", "columnwise", "dtype"))
    check_layouts(rowwise, columnwise)
    if takes_two_steps(via, x.shape[0], columnwise):
        total, y, mean, rstd = add_forward(x, branch, weight, bias, norm, dtype=via)
        return total, quantizer.quantize(y, **cast), mean, rstd
    if not torch.compiler.is_compiling():
        cast["statistics"] = statistics
    total, _, *layouts, mean, rstd = _add_forward(x, branch, weight, bias, *norm, via, **cast)
    packed = reference_quantizer.one_scale(dtype, rowwise, columnwise, *layouts)
    return x if branch is None else total, packed, mean if norm.kind == "layernorm" else None, rstd


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
    """Compute `backward`'s dx, dx rounded to `dtype`, dweight, dbias; with a branch, of x + branch in x's dtype.

    Of the rounded dx, amax, () float32, becomes the largest magnitude if larger, and column_sum, (N,) float32, adds the
    sum over rows. Sums over rows are the same in every run on the same GPU.
    """
    check(x, weight, None, norm.kind, branch)
    both = biased and mean is not None
    dx, copy, sums = _backward(
        dy, x, weight, mean, rstd, norm.zero_centered_gamma, residual, both, dtype, amax, column_sum, branch=branch
    )
    dweight, *dbias = sums.to(weight.dtype).unbind(0)
    return dx, copy, dweight, dbias[0] if dbias else None


def _add_forward_by_reference(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool,
    kind: str, out_dtype: torch.dtype, **cast: Any,
) -> Any:  # fmt: skip
    given = x, branch, weight, bias, Norm(eps, zero_centered_gamma, kind)
    made: tuple[Any, ...]
    if cast["dtype"] is None:
        total, y, mean, rstd = reference.add_forward(*given, dtype=out_dtype, amax=cast["amax"])
        made = y, None, None, None
    else:
        total, q, mean, rstd = reference.add_forward_quantized(*given, via=out_dtype, **cast)
        made = None, q.data, q.data_t, q.scale_inv if cast["rowwise"] else q.scale_inv_t
    return None if branch is None else total, *made, mean, rstd


def _fake_add_forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool,
    kind: str, out_dtype: Any, scale: Any, dtype: Any, rowwise: bool, columnwise: bool, *_: Any,
) -> Any:  # fmt: skip
    m, n = x.shape
    total = None if branch is None else x.new_empty(x.shape)
    y, scale_inv = (x.new_empty((m, n), dtype=out_dtype), None) if dtype is None else (None, float32(x))
    mean = float32(x, m) if kind == "layernorm" else None
    return total, y, *empty_pair(m, n, x, dtype, rowwise, columnwise), scale_inv, mean, float32(x, m)


def _backward_by_reference(out_dtype: torch.dtype, zero_centered_gamma: bool, **given: Any) -> Any:
    norm = Norm(0.0, zero_centered_gamma, "rmsnorm" if given["mean"] is None else "layernorm")
    dx, copy, *sums = reference.backward_rounded(norm=norm, dtype=out_dtype, **given)
    return dx, copy, torch.stack([s.float() for s in sums if s is not None])


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Any, rstd: Tensor, zero_centered_gamma: bool, residual: Any,
    biased: bool, out_dtype: torch.dtype, *_: Any,
) -> Any:  # fmt: skip
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=out_dtype), float32(x, 1 + biased, x.shape[1])


_add_forward = operator(
    "norm_add_forward",
    residual_forward.add_forward,
    _fake_add_forward,
    plain=_add_forward_by_reference,
    writes=("amax", "counts"),
    leading=14,
)
_backward = operator(
    "norm_backward_rounded",
    residual_backward.backward_rounded,
    _fake_backward,
    plain=_backward_by_reference,
    writes=("amax", "column_sum"),
)

RESIDUAL = Residual(
    add_forward=add_forward,
    add_forward_quantized=add_forward_quantized,
    backward_rounded=backward_rounded,
)
