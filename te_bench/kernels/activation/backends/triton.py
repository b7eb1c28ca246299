"""Fused activations in Triton: plain, and with the FP8 cast into both layouts, amax and the bias gradient in one pass.

torch.compile sees four operators, whose CPU implementation is the reference.
"""

from typing import Any

import torch
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.activation import Backend, Problem, kernels, width
from te_bench.kernels.activation.backends import reference
from te_bench.kernels.operators import operator, takes_two_steps
from te_bench.kernels.quantize import Quantized, check_layouts
from te_bench.kernels.quantize.backends import reference as reference_quantizer
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
    made: Tensor = _forward(x, kind)
    return made


def forward_quantized(x: Tensor, kind: str, **cast: Any) -> Quantized:
    """Compute fp8(y * scale) in the requested layouts; y is `forward`'s, rounded to x's dtype first.

    cast: scale, dtype, rowwise, columnwise, amax, counts; see Backend. Raises ValueError as `forward`.
    """
    width(x, kind)
    if _in_two_steps(x, cast):
        return quantizer.quantize(forward(x, kind), **cast)
    made = _forward_quantized(x, kind, **cast)
    return reference_quantizer.one_scale(cast["dtype"], cast["rowwise"], cast["columnwise"], *made)


def backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """Compute dx = dy * f'(x), gated [dy * x[:, F:] * f'(x[:, :F]), dy * f(x[:, :F])], with x's shape and dtype."""
    width(x, kind, dy)
    made: Tensor = _backward(dy, x, kind)
    return made


def backward_quantized(dy: Tensor, x: Tensor, kind: str, **cast: Any) -> Quantized:
    """Compute fp8(dx * scale) in the requested layouts, dx rounded to x's dtype first; column_sum += sum_M(dx).

    cast: as for `forward_quantized`, and column_sum, float32 of x's width. Raises ValueError as `backward`.
    """
    width(x, kind, dy)
    if _in_two_steps(x, cast):
        return quantizer.quantize(backward(dy, x, kind), **cast)
    made = _backward_quantized(dy, x, kind, **cast)
    return reference_quantizer.one_scale(cast["dtype"], cast["rowwise"], cast["columnwise"], *made)


def _in_two_steps(x: Tensor, cast: dict[str, Any]) -> bool:
    check_layouts(cast["rowwise"], cast["columnwise"])
    return takes_two_steps(x.dtype, x.shape[0], cast["columnwise"])


def _forward_by_reference(**given: Any) -> Any:
    return _layouts(reference.forward_quantized(**given))


def _backward_by_reference(**given: Any) -> Any:
    return _layouts(reference.backward_quantized(**given))


def _layouts(q: Quantized) -> tuple[Any, Any, Any]:
    return q.data, q.data_t, q.scale_inv_t if q.data is None else q.scale_inv


def _fake_quantized(x: Tensor, columns: int, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> Any:
    return *empty_pair(x.shape[0], columns, x, dtype, rowwise, columnwise), float32(x)


_forward = operator(
    "activation_forward",
    kernels.forward,
    lambda x, kind: x.new_empty((x.shape[0], width(x, kind))),
    plain=reference.forward,
)
_forward_quantized = operator(
    "activation_forward_quantized",
    kernels.forward_quantized,
    lambda x, kind, scale, *cast: _fake_quantized(x, width(x, kind), *cast[:3]),
    plain=_forward_by_reference,
    writes=("amax", "counts"),
)
_backward = operator(
    "activation_backward",
    kernels.backward,
    lambda dy, x, kind: x.new_empty(x.shape),
    plain=reference.backward,
    leading=3,
)
_backward_quantized = operator(
    "activation_backward_quantized",
    kernels.backward_quantized,
    lambda dy, x, kind, scale, *cast: _fake_quantized(x, x.shape[1], *cast[:3]),
    plain=_backward_by_reference,
    writes=("amax", "counts", "column_sum"),
    leading=10,
)

BACKEND = Backend(
    forward=forward,
    forward_quantized=forward_quantized,
    backward=backward,
    backward_quantized=backward_quantized,
    unsupported=unsupported,
)
