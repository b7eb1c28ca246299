"""Attention rivals, one file each: softmax(scale Q K^T, masked) V, forward and backward.

Shapes: q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) -> (B, H, T, Dv). Hkv divides H: query head h reads key head
h // (H / Hkv). A causal row i sees keys 0..i, whatever T and S are (aligned at the top left). **A mask's True hides.**
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from te_bench import plugins

AUTO = "auto"  # the backend that chooses among the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The problem given to a backend. `capability` is the GPU's compute capability, None on a CPU.

    If kv_heads, kv_length and v_head_dim (Hkv, S, Dv) are None, they equal heads, length and head_dim (H, T, D).
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
    mask: bool = False  # a mask besides, or instead of, the causal one
    window: tuple[int, int] | None = None  # (left, right): row i sees keys i - left to i + right at most, -1 for no end
    packed: bool = False  # `batch` packed sequences of at most `length` rows and `kv_length` keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One rival.

    forward(q, k, v, *, causal, scale, dropout=0.0, mask=None): the attention above, differentiable. mask: bool, of
    shape (T, S) or (B or 1, H or 1, T or 1, S); it comes with causal=False and hides no row's every key (`attend`
    ensures both).
    windows: forward also takes window=(left, right), with any mask and causal, and a row without visible keys gives 0,
    whatever its gradient. Without it, a window becomes a mask (`posed`).
    packed(q, k, v, starts_q, starts_k, longest, *, causal, scale, dropout, window): packed sequences, as in
    `packed.attend_packed`, which pads them for a backend without it.
    unsupported(problem): why it cannot, or None (the default). It never falls back to another kernel.
    kernels: device -> regular expression over the names of kernels that prove it ran; no entry means it has only
    ordinary operators. operators: the same over operator names, which a profiler sees only if nothing was compiled or
    captured.
    compiled: torch.compile makes it, in eager mode, too.
    fp8: it rounds its operands to FP8, and its name says so (`in_fp8`). It runs only if FP8 attention is requested,
    `auto` never picks it, and manual_fp8 is its error reference (`yardstick`).
    choose, chosen: only for `auto`, which hands every problem to another backend: the name that it picks, and all names
    that it has picked in this process.
    """

    forward: Callable[..., Any]
    unsupported: Callable[[Problem], str | None] = lambda problem: None
    kernels: Mapping[str, str] = field(default_factory=dict)
    operators: str | None = None
    windows: bool = False
    packed: Callable[..., Any] | None = None
    compiled: bool = False
    fp8: bool = False
    choose: Callable[[Problem], str] | None = None
    chosen: Callable[[], tuple[str, ...]] | None = None


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load


def in_fp8(name: str) -> bool:
    """Return whether the backend rounds its operands to FP8; its name says so, for planning without torch."""
    return name.endswith("_fp8")


def unsupported_in_fp8(p: Problem) -> str | None:
    """Return what no FP8 attention supports of this problem, or None."""
    if p.mask:
        return "mask: FP8 attention has the causal one alone"
    if p.window is not None:
        return "window: FP8 attention has the causal mask alone"
    if p.dropout:
        return f"dropout {p.dropout}: FP8 attention has none"
    return None


def yardstick(name: str) -> str:
    """Return the backend against which this one's error is measured: the plain definition, in FP8 if this one is."""
    return "manual_fp8" if in_fp8(name) else "manual"


def rival(name: str, problem: Problem) -> str:
    """Return the backend that computes this problem when `name` is requested; they differ only for `auto`."""
    choose = load(name).choose
    return name if choose is None else choose(problem)


def posed(backend: Backend, problem: Problem) -> Problem:
    """Return the problem as `attend` poses it to this backend: without windows, anything but causal becomes a mask.

    A backend without packed sequences gets padded ones, and a mask of the padding.
    """
    if problem.packed and backend.packed is None:
        problem = replace(problem, packed=False, mask=True)
    if backend.windows or (problem.window is None and not (problem.causal and problem.mask)):
        return problem
    return replace(problem, causal=False, mask=True, window=None)


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
    window: tuple[int, int] | None = None,
) -> Any:
    """Compute backend.forward with any window, and any mask broadcastable to (B, H, T, S); True hides.

    A row without visible keys gives 0, with gradients 0. A backend without windows gets one mask for all; its dead rows
    see all keys, so that no kernel divides 0 by 0, and their output is dropped.
    """
    if backend.windows:
        return backend.forward(q, k, v, causal=causal, scale=scale, dropout=dropout, mask=mask, window=window)
    if mask is None and window is None:
        return backend.forward(q, k, v, causal=causal, scale=scale, dropout=dropout)
    mask = _hidden(q, k, causal, mask, window)
    dead = mask.all(-1, keepdim=True)
    out = backend.forward(q, k, v, causal=False, scale=scale, dropout=dropout, mask=mask & ~dead)
    return out.masked_fill(dead, 0.0)


def _hidden(q: Any, k: Any, causal: bool, mask: Any | None, window: tuple[int, int] | None) -> Any:
    """Return a mask, of two or four dimensions, that also hides what the window and the causal mask do; S wide."""
    if mask is not None and mask.dim() != 2:
        mask = mask[(None,) * (4 - mask.dim())]
    left, right = (-1, -1) if window is None else window
    right = 0 if causal else right
    rows, keys = q.shape[-2], k.shape[-2]
    if right >= 0 or left >= 0:
        ones = q.detach().new_ones(rows, keys)
        after = ones.triu(right + 1) if right >= 0 else 0 * ones
        outside = (after if left < 0 else after + ones.tril(-left - 1)).bool()
        mask = outside if mask is None else mask | outside
    assert mask is not None
    return mask.expand(*mask.shape[:-1], keys)


def wrong_kernel(name: str, device: str, seen: Sequence[str], *, eager: bool) -> str | None:
    """Return why the kernels that a profiler saw are not this backend's, or None if they are.

    Its own must be among them (if it has any), and no other backend's. For `auto` they must be those of a backend that
    it has picked in this process.
    """
    chosen = load(name).chosen
    allowed = (name,) if chosen is None else chosen()
    if not allowed:
        return f"asked for {name}, which chose no backend in this process"
    asked = name if chosen is None else f"{name}, which chose {' and '.join(allowed)}"
    reasons = [_not_seen(own, asked, device, seen, eager) for own in allowed]
    if all(reasons):
        return reasons[0]
    known = {load(own).kernels.get(device) for own in allowed}
    for other in names():
        pattern = load(other).kernels.get(device)
        if other in allowed or pattern is None or pattern in known:
            continue
        for kernel in seen:
            if re.search(pattern, kernel):
                return f"asked for {asked}, but {other} ran ({kernel[:80]})"
    return None


def seen(device: str, kernels: Sequence[str]) -> list[str]:
    """Return the backends with a kernel, or without kernels on that device an operator, that a profiler saw."""
    ran = []
    for name in names():
        backend = load(name)
        pattern = backend.kernels.get(device) or backend.operators
        if pattern and any(re.search(pattern, kernel) for kernel in kernels):
            ran.append(name)
    return ran


def _not_seen(own: str, asked: str, device: str, seen: Sequence[str], eager: bool) -> str | None:
    """Return that no kernel or operator of backend `own` was seen; None if it was, or it has none."""
    backend = load(own)
    for pattern in (backend.kernels.get(device), backend.operators if eager else None):
        if pattern and not any(re.search(pattern, kernel) for kernel in seen):
            return f"asked for {asked}, but nothing that ran matches /{pattern}/"
    return None
