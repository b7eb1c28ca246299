"""Activation rivals, one file each: functions on (M, N) tensors, forward and backward, without autograd.

y = f(x), or, of a gated kind, y = f(x[:, :F]) * x[:, F:]: x (M, 2F) -> (M, F), the first half through f, in Transformer
Engine's order. f by its name in KINDS, s being the logistic function:
gelu x s(2 sqrt(2 / pi) (x + 0.044715 x^3)), the tanh approximation; gelu_erf x Phi(x), the exact one, Phi being the normal
distribution's; qgelu x s(1.702 x); silu x s(x); sigmoid s(x);
relu max(x, 0); srelu max(x, 0)^2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_bench import plugins

#: Transformer Engine's name -> f, and whether it is gated; gelu_erf is nanoGPT's, which Transformer Engine lacks.
#: Source: Transformer Engine, common/activation.
KINDS = {
    "gelu": ("gelu", False),
    "gelu_erf": ("gelu_erf", False),
    "geglu": ("gelu", True),
    "glu": ("sigmoid", True),
    "qgelu": ("qgelu", False),
    "qgeglu": ("qgelu", True),
    "relu": ("relu", False),
    "reglu": ("relu", True),
    "srelu": ("srelu", False),
    "sreglu": ("srelu", True),
    "silu": ("silu", False),
    "swiglu": ("silu", True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """`capability` is the GPU's compute capability, None on a CPU."""

    quantized: bool  # the quantising variants are wanted too
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One rival. x (M, F), of a gated kind (M, 2F), rows contiguous; y and dy (M, F); dx is of x's shape and dtype.

    forward(x, kind) -> y in x's dtype.
    forward_quantized(x, kind, *, scale, dtype, rowwise, columnwise, amax=None, counts=None) -> Quantized: y, rounded to
    x's dtype, then what quantize's `scaled` does with it.
    backward(dy, x, kind) -> dx.
    backward_quantized(dy, x, kind, *, scale, dtype, rowwise, columnwise, amax=None, counts=None, column_sum=None) ->
    Quantized: dx, rounded to x's dtype, then `scaled`; the sum of dx over rows, the gradient of a bias, is added to
    column_sum, float32 of x's width, in the same order in every run.
    """

    forward: Callable[..., Any]
    forward_quantized: Callable[..., Any]
    backward: Callable[..., Any]
    backward_quantized: Callable[..., Any]
    unsupported: Callable[[Problem], str | None] = lambda problem: None


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load


def width(x: Any, kind: str, dy: Any = None) -> int:
    """F, the columns of y. Raises ValueError for an unknown kind and for shapes that do not fit it."""
    plugins.check("activation", kind, list(KINDS))
    gated = KINDS[kind][1]
    if x.dim() != 2 or (gated and x.shape[1] % 2):
        raise ValueError(f"x {tuple(x.shape)}: {kind} takes (M, {'2F' if gated else 'F'})")
    f = x.shape[1] // 2 if gated else x.shape[1]
    if dy is not None and tuple(dy.shape) != (x.shape[0], f):
        raise ValueError(f"dy {tuple(dy.shape)}: {kind} of x {tuple(x.shape)} has the output ({x.shape[0]}, {f})")
    return f
