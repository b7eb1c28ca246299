"""Activation rivals, one file each: functions on (M, N) tensors, forward and backward, without autograd.

y = f(x); for a gated kind y = f(x[:, :F]) * x[:, F:]: x (M, 2F) -> (M, F), the first half through f, as in Transformer
Engine. The functions f by their names in KINDS, with s the logistic function:
gelu x s(2 sqrt(2 / pi) (x + 0.044715 x^3)), the tanh approximation; gelu_erf x Phi(x), exact, Phi the normal
distribution function; qgelu x s(1.702 x); silu x s(x); sigmoid s(x); relu max(x, 0); srelu max(x, 0)^2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_bench import plugins

#: {name: (f, whether it is gated)}; Transformer Engine's names, except gelu_erf, which is nanoGPT's. Source:
#: Transformer Engine, common/activation.
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

    quantized: bool  # the quantising variants are needed, too
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One rival. x (M, F), or (M, 2F) for a gated kind, rows contiguous; y and dy (M, F); dx has x's shape and dtype.

    forward(x, kind) -> y in x's dtype.
    forward_quantized(x, kind, *, scale, dtype, rowwise, columnwise, amax=None, counts=None) -> Quantized: y, rounded to
    x's dtype, then quantised by that scale.
    backward(dy, x, kind) -> dx.
    backward_quantized(dy, x, kind, *, scale, dtype, rowwise, columnwise, amax=None, counts=None, column_sum=None) ->
    Quantized: dx, rounded to x's dtype, then quantised. The sum of dx over rows (a bias gradient) is added to
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
    """Return F, the columns of y. Raises ValueError for an unknown kind and for shapes that do not fit it."""
    plugins.check("activation", kind, list(KINDS))
    gated = KINDS[kind][1]
    if x.dim() != 2 or (gated and x.shape[1] % 2):
        raise ValueError(f"x {tuple(x.shape)}: {kind} takes (M, {'2F' if gated else 'F'})")
    f = x.shape[1] // 2 if gated else x.shape[1]
    if dy is not None and tuple(dy.shape) != (x.shape[0], f):
        raise ValueError(f"dy {tuple(dy.shape)}: {kind} of x {tuple(x.shape)} has the output ({x.shape[0]}, {f})")
    return f
