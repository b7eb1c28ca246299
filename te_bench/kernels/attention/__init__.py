"""Attention rivals, one file each: softmax(scale Q K^T, masked) V, forward and backward.

Shapes: q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) -> (B, H, T, Dv). Hkv divides H: query head h reads key head
h // (H / Hkv). A causal row i sees keys 0..i, whatever T and S are (aligned at the top left). **A mask's True hides.**
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from te_bench import plugins


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What a backend is asked to do. `capability` is the GPU's compute capability, None on a CPU.

    kv_heads, kv_length and v_head_dim (Hkv, S, Dv) are heads, length and head_dim (H, T, D) where they are None.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str  # "fp64", "fp32", "bf16", "fp16"
    causal: bool
    dropout: float
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None
    kv_heads: int | None = None
    kv_length: int | None = None
    v_head_dim: int | None = None
    mask: bool = False  # a mask beside, or instead of, the causal one


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One rival.

    forward(q, k, v, *, causal, scale, dropout=0.0, mask=None): as above, differentiable by autograd. mask: bool, of shape
    (T, S) or (B or 1, H or 1, T or 1, S); it comes with causal=False and hides no row's every key (`attend` sees to both).
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


def attend(
    backend: Backend,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    mask: Any | None = None,
) -> Any:
    """backend.forward with any mask broadcastable to (B, H, T, S): a row that sees no key is 0, and so are its gradients.

    True hides. Such dead rows are given all keys, so that no kernel divides 0 by 0, and their output is thrown away.
    """
    if mask is None:
        return backend.forward(q, k, v, causal=causal, scale=scale, dropout=dropout)
    if causal:
        rows, keys = q.shape[-2], k.shape[-2]
        mask = mask | mask.new_ones(rows, keys).triu(1)
    mask = mask.expand(*mask.shape[:-1], k.shape[-2])
    dead = mask.all(-1, keepdim=True)
    out = backend.forward(q, k, v, causal=False, scale=scale, dropout=dropout, mask=mask & ~dead)
    return out.masked_fill(dead, 0.0)


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
