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
    window: tuple[int, int] | None = None  # (left, right): row i sees keys i - left to i + right at most, -1 for no end
    packed: bool = False  # `batch` sequences one after the other, of at most `length` rows and `kv_length` keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One rival.

    forward(q, k, v, *, causal, scale, dropout=0.0, mask=None): as above, differentiable by autograd. mask: bool, of shape
    (T, S) or (B or 1, H or 1, T or 1, S); it comes with causal=False and hides no row's every key (`attend` sees to both).
    windows: forward takes window=(left, right) too, any mask and the causal flag beside it, and a row that sees no key is 0
    whatever comes back to it; others are given a mask in place of a window (`posed`).
    packed(q, k, v, starts_q, starts_k, longest, *, causal, scale, dropout, window): of packed sequences, as
    `packed.attend_packed` says; it pads them for a backend that has none.
    unsupported(problem): why it can't, or None, which is the default. It never falls back to another kernel.
    kernels: device -> regular expression over the names of the kernels that prove it ran; a device that is absent has no
    kernel of its own (the backend is made of ordinary operators). operators: the same over operator names, which a
    profiler sees only when nothing was compiled or captured.
    compiled: it is made by torch.compile in eager mode, too.
    fp8: it rounds its operands to FP8, as its name ends in (`in_fp8`). Nobody gets such a backend who did not ask for FP8
    attention, `auto` takes none, and its errors are held to those of manual_fp8 (`yardstick`).
    choose, chosen: of a backend that hands every problem to another one, `auto`: the name that it gives to, and all that it
    has given to in this process.
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
    """Whether the backend rounds its operands to FP8: its name says so to who plans without torch."""
    return name.endswith("_fp8")


def unsupported_in_fp8(p: Problem) -> str | None:
    """What no FP8 attention can do, or None."""
    if p.mask:
        return "mask: FP8 attention has the causal one alone"
    if p.window is not None:
        return "window: FP8 attention has the causal mask alone"
    if p.dropout:
        return f"dropout {p.dropout}: FP8 attention has none"
    return None


def yardstick(name: str) -> str:
    """The backend whose error is the measure of this one's: the definition, in the inputs' dtype or by way of FP8."""
    return "manual_fp8" if in_fp8(name) else "manual"


def rival(name: str, problem: Problem) -> str:
    """The backend that computes this problem where `name` is asked for: itself, but for `auto`."""
    choose = load(name).choose
    return name if choose is None else choose(problem)


def posed(backend: Backend, problem: Problem) -> Problem:
    """The problem as `attend` puts it to this backend: to one without windows, a mask for what is not causal alone.

    A backend that takes no packed sequences gets padded ones, and a mask of the padding.
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
    """backend.forward with any window, and any mask broadcastable to (B, H, T, S); a row that sees no key is 0.

    So are such a row's gradients. True hides. A backend without windows gets a mask for all of them; its dead rows are
    given all keys, so that no kernel divides 0 by 0, and their output is thrown away.
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
    """The mask, or a new one, that hides what the window and the causal mask do as well; S wide."""
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
    """Why the kernels a profiler saw are not this backend's, or None when they are.

    Its own must be among them (where it has any), and no other backend's may be. Of `auto` they must be those of a backend
    that it has chosen in this process.
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
    """The backends of which a profiler saw a kernel, or where they have none on that device an operator."""
    found = []
    for name in names():
        backend = load(name)
        pattern = backend.kernels.get(device) or backend.operators
        if pattern and any(re.search(pattern, kernel) for kernel in kernels):
            found.append(name)
    return found


def _not_seen(own: str, asked: str, device: str, seen: Sequence[str], eager: bool) -> str | None:
    """That no kernel, or operator, of the backend `own` was seen, or None where they were or it has none."""
    backend = load(own)
    for pattern in (backend.kernels.get(device), backend.operators if eager else None):
        if pattern and not any(re.search(pattern, kernel) for kernel in seen):
            return f"asked for {asked}, but nothing that ran matches /{pattern}/"
    return None
