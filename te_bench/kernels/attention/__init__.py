"""Attention rivals, one file each. softmax(scale * Q K^T + mask) V on (B, H, T, D) tensors, forward and backward."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from te_bench import plugins


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What a backend is asked to do. `capability` is the GPU's compute capability, None on a CPU."""

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str  # "fp32", "bf16", "fp16"
    causal: bool
    dropout: float
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One rival.

    forward(q, k, v, *, causal, scale, dropout): (B, H, T, D) x3 -> (B, H, T, D), differentiable by autograd.
    unsupported(problem): why it can't, or None. It never falls back to another kernel.
    kernels: device -> regular expression over the names of the kernels that prove it ran; a device that is absent has no
    kernel of its own (the backend is made of ordinary operators). operators: the same over operator names, which a
    profiler sees only when nothing was compiled or captured.
    """

    forward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None]
    kernels: Mapping[str, str] = field(default_factory=dict)
    operators: str | None = None


def names() -> list[str]:
    return plugins.names(__name__)


def load(name: str) -> Backend:
    """The backend in NAME.py. Raises ValueError for an unknown name."""
    backend = plugins.load(__name__, name, "BACKEND")
    assert isinstance(backend, Backend)
    return backend


def wrong_kernel(name: str, device: str, seen: Sequence[str], *, eager: bool) -> str | None:
    """Why the kernels a profiler saw are not this backend's, or None when they are.

    Its own must be among them (where it has any), and no other backend's may be.
    """
    own = load(name)
    wanted = [own.kernels.get(device), own.operators if eager else None]
    for pattern in wanted:
        if pattern and not any(re.search(pattern, kernel) for kernel in seen):
            return f"asked for {name}, but nothing that ran matches /{pattern}/"
    for other in names():
        pattern = load(other).kernels.get(device)
        if other == name or pattern is None or pattern == own.kernels.get(device):
            continue
        for kernel in seen:
            if re.search(pattern, kernel):
                return f"asked for {name}, but {other} ran ({kernel[:80]})"
    return None
