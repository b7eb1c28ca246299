"""FP8 GEMM rivals, one file each: D = (a * a_scale_inv) @ (b * b_scale_inv).T with both operands K-major."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_bench import plugins


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """a (M, K) and b (N, K) in FP8, contiguous along K."""

    m: int
    n: int
    k: int
    a_dtype: str  # "e4m3", "e5m2"
    b_dtype: str
    device: str
    capability: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """forward(a, b, a_scale_inv, b_scale_inv, *, out_dtype, fast_accum): (M, K), (N, K), (), () -> (M, N)."""

    forward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None]


def names() -> list[str]:
    return plugins.names(__name__)


def load(name: str) -> Backend:
    """The backend in NAME.py. Raises ValueError for an unknown name."""
    backend = plugins.load(__name__, name, "BACKEND")
    assert isinstance(backend, Backend)
    return backend
