"""Attention in the table of measured times: its problems, and how near two of them are. Imports no torch.

Seconds are for a forward and a backward pass together.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from te_bench.kernels import measured
from te_bench.kernels.attention import Problem
from te_bench.kernels.measured import Timing

#: The largest `distance`, in doublings, from which a row is used. Four times the length is six: two for queries, two
#: for keys and two for the keys that a row sees.
FARTHEST = 6.0


def whole(p: Problem) -> Problem:
    """Return the problem with all sizes set, its mask in canonical form, and without GPU features."""
    left, right = (-1, -1) if p.window is None else p.window
    right = 0 if p.causal else right
    return replace(
        p,
        capability=None,
        causal=right == 0,
        window=None if left < 0 and right <= 0 else (left, right),
        kv_heads=p.heads if p.kv_heads is None else p.kv_heads,
        kv_length=p.length if p.kv_length is None else p.kv_length,
        v_head_dim=p.head_dim if p.v_head_dim is None else p.v_head_dim,
    )


def distance(a: Problem, b: Problem) -> float:
    """Count the doublings between two `whole` problems: queries, keys, all heads, query heads per key head, windows.

    It is infinite unless dtype, head widths, and kinds of mask and dropout are equal.
    """
    if _kind(a) != _kind(b) or not all(_sizes(a) + _sizes(b)):
        return math.inf
    return sum(abs(math.log2(x / y)) for x, y in zip(_sizes(a), _sizes(b), strict=True))


def _kind(p: Problem) -> tuple[Any, ...]:
    windowed = None if p.window is None else tuple(side >= 0 for side in p.window)
    return p.device, p.dtype, p.causal, p.mask, p.packed, windowed, p.dropout > 0, p.head_dim, p.v_head_dim


def _sizes(p: Problem) -> tuple[float, ...]:
    keys = p.kv_length or 0
    width = keys
    if p.window is not None:
        left, right = (keys if side < 0 else side for side in p.window)
        width = min(left + right + 1, keys)
    return p.length, keys, p.batch * p.heads, width, p.heads / max(p.kv_heads or 1, 1)


def nearest(machine: str, problem: Problem) -> tuple[Timing, float] | None:
    """Return the machine's nearest row and its distance, at most FARTHEST doublings; or None."""
    asked = whole(problem)

    def doublings(known: Problem) -> float:
        far = distance(known, asked)
        return far if far <= FARTHEST else math.inf

    return measured.nearest("attention", machine, doublings)


def read_problem(body: Mapping[str, Any]) -> Problem:
    """Read a problem from a row's JSON. Raises ValueError, KeyError or TypeError if it is invalid."""
    settings = dict(body)
    window = settings.get("window")
    if window is not None:
        left, right = window
        settings["window"] = int(left), int(right)
    found = whole(Problem(**settings, capability=None))
    if not all(size > 0 for size in (found.batch, found.heads, found.head_dim, *_sizes(found))):
        raise ValueError(f"sizes must be at least 1: {settings}")
    return found
