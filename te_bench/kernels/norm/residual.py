"""A norm in a residual stream, in Triton: addition, norm, rounding and cast in one kernel (wide rows: two); the
backward pass casts in another.

torch.compile sees two operators, whose CPU implementation is the reference; eager calls go straight to the launchers.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.norm import Residual, check, check_stream, residual_backward, residual_forward
from te_bench.kernels.norm.backends import reference
from te_bench.kernels.operators import takes_two_steps, with_all, without_none
from te_bench.kernels.quantize import TENSOR, Layout, Quantized, check_layouts
from te_bench.kernels.quantize.backends import triton as quantizer
from te_bench.kernels.quantize.kernels import float32
from te_bench.kernels.tile import empty_pair


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
    """Compute total = x + branch in x's dtype (x itself without a branch), y = norm(total) in `dtype`, mean, rstd.

    x, branch (M, N); statistics as in `forward`. amax, () float32, becomes max(amax, max |y|). Raises ValueError as
    `forward`, and for a branch of another shape.
    """
    check(x, weight, bias, kind)
    check_stream(x, branch)
    run = _add_forward_op if torch.compiler.is_compiling() else residual_forward.add_forward
    total, y, _, _, _, mean, rstd = run(
        *(x, branch, weight, bias, eps, zero_centered_gamma, kind, dtype), *NO_CAST, amax, None
    )
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
    zero_centered_gamma: bool = False,
    kind: str = "layernorm",
    statistics: tuple[Tensor | None, Tensor] | None = None,
    **cast: Any,
) -> tuple[Tensor, Quantized, Tensor | None, Tensor]:
    """Compute total, fp8(y * scale) in the requested layouts, mean, rstd; `add_forward`'s y is rounded to `via` first.

    cast: scale, dtype, rowwise, columnwise, amax, counts; statistics: see Residual. Raises ValueError as `add_forward`.
    """
    check(x, weight, bias, kind)
    check_stream(x, branch)
    rowwise, columnwise, dtype = (cast[name] for name in ("rowwise", "columnwise", "dtype"))
    check_layouts(rowwise, columnwise)
    if takes_two_steps(via, x.shape[0], columnwise):
        options: dict[str, Any] = {"eps": eps, "dtype": via, "zero_centered_gamma": zero_centered_gamma, "kind": kind}
        total, y, mean, rstd = add_forward(x, branch, weight, bias, **options)
        return total, quantizer.scaled(y, **cast), mean, rstd
    given = (x, branch, weight, bias, eps, zero_centered_gamma, kind, via)
    if torch.compiler.is_compiling():
        made = _add_forward_op(*given, **with_all(cast, "amax", "counts"))
    else:
        made = residual_forward.add_forward(*given, **with_all(cast, "amax", "counts"), statistics=statistics)
    total, _, data, data_t, scale_inv, mean, rstd = made
    layout = Layout(dtype, TENSOR, torch.float32)
    packed = quantizer.wrap(rowwise, columnwise, data, data_t, scale_inv, scale_inv, layout=layout)
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
    """Compute `backward`'s dx, dx rounded to `dtype`, dweight, dbias; with a branch, of x + branch in x's dtype.

    Of the rounded dx, amax, () float32, becomes the largest magnitude if larger, and column_sum, (N,) float32, adds the
    sum over rows. Sums over rows are the same in every run on the same GPU.
    """
    check(x, weight, None, kind)
    check_stream(x, branch)
    run = _backward_op if torch.compiler.is_compiling() else residual_backward.backward_rounded
    both = biased and mean is not None
    dx, copy, sums = run(
        dy, x, weight, mean, rstd, zero_centered_gamma, residual, both, dtype, amax, column_sum, branch
    )
    dweight, *dbias = sums.to(weight.dtype).unbind(0)
    return dx, copy, dweight, dbias[0] if dbias else None


backward_quantized = functools.partial(reference.backward_cast, backward_rounded, quantizer.scaled)

NO_CAST = (None, None, False, False)  # scale, dtype, rowwise, columnwise


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
    dtype: torch.dtype | None,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = x, branch, weight, bias
    made: Any
    if x.is_cuda:
        cast: Any = scale, dtype, rowwise, columnwise, amax, counts
        total, *made = residual_forward.add_forward(*given, eps, zero_centered_gamma, kind, out_dtype, *cast)
    else:
        options: dict[str, Any] = {"eps": eps, "zero_centered_gamma": zero_centered_gamma, "kind": kind, "amax": amax}
        if dtype is None:
            total, y, mean, rstd = reference.add_forward(*given, dtype=out_dtype, **options)
            made = y, None, None, None, mean, rstd
        else:
            options |= {"scale": scale, "dtype": dtype, "rowwise": rowwise, "columnwise": columnwise, "counts": counts}
            total, q, mean, rstd = reference.add_forward_quantized(*given, via=out_dtype, **options)
            made = None, q.data, q.data_t, q.scale_inv if rowwise else q.scale_inv_t, mean, rstd
    # An operator may not return its own input.
    return without_none(x, None if branch is None else total, *made)


@_add_forward_op.register_fake
def _(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool,
    kind: str, out_dtype: Any, scale: Any, dtype: Any, rowwise: bool, columnwise: bool, *_: Any,
) -> Any:  # fmt: skip
    m, n = x.shape
    total = None if branch is None else x.new_empty(x.shape)
    y, scale_inv = (x.new_empty((m, n), dtype=out_dtype), None) if dtype is None else (None, float32(x))
    mean = float32(x, m) if kind == "layernorm" else None
    return without_none(x, total, y, *empty_pair(m, n, x, dtype, rowwise, columnwise), scale_inv, mean, float32(x, m))


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
    kind = "rmsnorm" if mean is None else "layernorm"
    options: dict[str, Any] = {"zero_centered_gamma": zero_centered_gamma, "kind": kind, "residual": residual}
    options |= {"biased": biased, "amax": amax, "column_sum": column_sum, "branch": branch}
    dx, copy, *sums = reference.backward_rounded(dy, x, weight, mean, rstd, dtype=out_dtype, **options)
    return dx, copy, torch.stack([s.float() for s in sums if s is not None])


@_backward_op.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Any, rstd: Tensor, zero_centered_gamma: bool, residual: Any,
    biased: bool, out_dtype: torch.dtype, *_: Any,
) -> Any:  # fmt: skip
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=out_dtype), float32(x, 1 + biased, x.shape[1])


RESIDUAL = Residual(
    add_forward=add_forward,
    add_forward_quantized=add_forward_quantized,
    backward_rounded=backward_rounded,
    backward_quantized=backward_quantized,
)
