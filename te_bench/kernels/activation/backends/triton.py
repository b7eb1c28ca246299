"""Fused activations in Triton: plain, and with the FP8 cast into both layouts, amax and the bias gradient in one pass.

torch.compile sees four operators, whose CPU implementation is the reference. Eager calls go straight to the launchers,
because a custom operator costs the host about 20 us a call.
"""

from typing import Any

import torch
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.activation import Backend, Problem, kernels, width
from te_bench.kernels.activation.backends import reference
from te_bench.kernels.operators import takes_two_steps, with_all, without_none
from te_bench.kernels.quantize import TENSOR, Layout, Quantized, check_layouts
from te_bench.kernels.quantize.backends import triton as quantizer
from te_bench.kernels.quantize.kernels import float32
from te_bench.kernels.tile import empty_pair, lacks_triton


def unsupported(p: Problem) -> str | None:
    return lacks_triton(p.device) or (architecture.lacks_fp8(p.capability) if p.quantized else None)


def forward(x: Tensor, kind: str) -> Tensor:
    """Compute y = f(x), or f(x[:, :F]) * x[:, F:] for a gated kind; x (M, F) or (M, 2F) -> (M, F) in x's dtype.

    Raises ValueError for an unknown kind, and for an odd width with a gated one.
    """
    width(x, kind)
    return _forward_op(x, kind) if torch.compiler.is_compiling() else kernels.forward(x, kind)


def forward_quantized(x: Tensor, kind: str, **cast: Any) -> Quantized:
    """Compute fp8(y * scale) in the requested layouts; y is `forward`'s, rounded to x's dtype first.

    cast: scale, dtype, rowwise, columnwise, amax, counts; see Backend. Raises ValueError as `forward`.
    """
    width(x, kind)
    check_layouts(cast["rowwise"], cast["columnwise"])
    if takes_two_steps(x.dtype, x.shape[0], cast["columnwise"]):
        return quantizer.scaled(forward(x, kind), **cast)
    run = _forward_quantized_op if torch.compiler.is_compiling() else kernels.forward_quantized
    return _wrap(run(x, kind, **with_all(cast, "amax", "counts")), cast)


def backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """Compute dx = dy * f'(x), gated [dy * x[:, F:] * f'(x[:, :F]), dy * f(x[:, :F])], with x's shape and dtype."""
    width(x, kind, dy)
    return _backward_op(dy, x, kind) if torch.compiler.is_compiling() else kernels.backward(dy, x, kind)


def backward_quantized(dy: Tensor, x: Tensor, kind: str, **cast: Any) -> Quantized:
    """Compute fp8(dx * scale) in the requested layouts, dx rounded to x's dtype first; column_sum += sum_M(dx).

    cast: as for `forward_quantized`, and column_sum, float32 of x's width. Raises ValueError as `backward`.
    """
    width(x, kind, dy)
    check_layouts(cast["rowwise"], cast["columnwise"])
    if takes_two_steps(x.dtype, x.shape[0], cast["columnwise"]):
        return quantizer.scaled(backward(dy, x, kind), **cast)
    run = _backward_quantized_op if torch.compiler.is_compiling() else kernels.backward_quantized
    return _wrap(run(dy, x, kind, **with_all(cast, "amax", "counts", "column_sum")), cast)


def _wrap(made: tuple[Tensor | None, Tensor | None, Tensor], cast: dict[str, Any]) -> Quantized:
    layout = Layout(cast["dtype"], TENSOR, torch.float32)
    return quantizer.wrap(cast["rowwise"], cast["columnwise"], *made, made[2], layout=layout)


@torch.library.custom_op("te_bench::activation_forward", mutates_args=())
def _forward_op(x: Tensor, kind: str) -> Tensor:
    return kernels.forward(x, kind) if x.is_cuda else reference.forward(x, kind)


@_forward_op.register_fake
def _(x: Tensor, kind: str) -> Tensor:
    return x.new_empty((x.shape[0], width(x, kind)))


@torch.library.custom_op("te_bench::activation_forward_quantized", mutates_args=("amax", "counts"))
def _forward_quantized_op(
    x: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda:
        return without_none(x, *kernels.forward_quantized(x, kind, scale, dtype, rowwise, columnwise, amax, counts))
    cast: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "amax": amax, "counts": counts}
    q = reference.forward_quantized(x, kind, scale=scale, dtype=dtype, **cast)
    return without_none(x, q.data, q.data_t, scale.reciprocal())


@_forward_quantized_op.register_fake
def _(x: Tensor, kind: str, scale: Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool, *_: Any) -> Any:
    return _empty(x, x.shape[0], width(x, kind), dtype, rowwise, columnwise)


@torch.library.custom_op("te_bench::activation_backward", mutates_args=())
def _backward_op(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    return kernels.backward(dy, x, kind) if x.is_cuda else reference.backward(dy, x, kind)


@_backward_op.register_fake
def _(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("te_bench::activation_backward_quantized", mutates_args=("amax", "counts", "column_sum"))
def _backward_quantized_op(
    dy: Tensor,
    x: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
    column_sum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    gathered = amax, counts, column_sum
    if x.is_cuda:
        made = kernels.backward_quantized(dy, x, kind, scale, dtype, rowwise, columnwise, *gathered)
        return without_none(x, *made)
    cast: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "amax": amax, "counts": counts}
    q = reference.backward_quantized(dy, x, kind, scale=scale, dtype=dtype, column_sum=column_sum, **cast)
    return without_none(x, q.data, q.data_t, scale.reciprocal())


@_backward_quantized_op.register_fake
def _(
    dy: Tensor, x: Tensor, kind: str, scale: Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool, *_: Any
) -> Any:
    return _empty(x, x.shape[0], x.shape[1], dtype, rowwise, columnwise)


def _empty(x: Tensor, m: int, n: int, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> Any:
    """Return empty data, data_t and scale_inv as the operators return them."""
    return without_none(x, *empty_pair(m, n, x, dtype, rowwise, columnwise), float32(x))


BACKEND = Backend(
    forward=forward,
    forward_quantized=forward_quantized,
    backward=backward,
    backward_quantized=backward_quantized,
    unsupported=unsupported,
)
