"""Attention in the table of measured times: its problems, and how near two of them are. Imports no torch.

Seconds are of one forward and one backward pass together.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from te_bench.kernels import measured
from te_bench.kernels.attention import Problem
from te_bench.kernels.measured import Timing

#: Doublings, as `distance` counts them, that a row may be away from a problem that it speaks for: four times the length
#: are six, two of queries, two of keys and two of the keys that a row may see.
FARTHEST = 6.0


def whole(p: Problem) -> Problem:
    """The problem with every size given, its mask told in one way (causal: no key after the row), and no GPU's traits."""
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
    """How many doublings apart two `whole` problems are: of queries, keys, heads in all, query heads a key head, windows.

    Infinite unless dtype, widths of the heads, and kinds of mask and dropout are the same.
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
    """The machine's row that is the fewest doublings away, FARTHEST at most, and how many; or None."""
    asked = whole(problem)

    def doublings(known: Problem) -> float:
        far = distance(known, asked)
        return far if far <= FARTHEST else math.inf

    return measured.nearest("attention", machine, doublings)


def read_problem(body: Mapping[str, Any]) -> Problem:
    """The problem of a row's JSON. Raises ValueError, KeyError or TypeError for what is none."""
    settings = dict(body)
    window = settings.get("window")
    if window is not None:
        left, right = window
        settings["window"] = int(left), int(right)
    found = whole(Problem(**settings, capability=None))
    if not all(size > 0 for size in (found.batch, found.heads, found.head_dim, *_sizes(found))):
        raise ValueError(f"sizes must be at least 1: {settings}")
    return found
