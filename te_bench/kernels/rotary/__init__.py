"""Rotary embedding rivals, one file each: functions on projections or attention's gradients, without autograd.

A pair of features (x, y) becomes (x cos a - y sin a, y cos b + x sin b), a and b being the angles of x's and y's places:
one angle, of a rotation. Transposed, as gradients are: (x cos a + y sin b, y cos b - x sin a).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_bench import plugins

DTYPES = ("fp32", "bf16", "fp16")
PARTS = 3  # in one call


class Rotated(NamedTuple):
    """x (T, B, G, R, D): positions, batch, groups, heads a group, features. `out`, of x's shape, gets the result, or is
    x.

    angles (T or more, d) float32, d even and at most D: features beyond d are unchanged; None: all are. Tables are (T
    or more, 2 d), the d cosines before the d sines, with any factor.
    """

    x: Any
    out: Any
    angles: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """`capability` is the GPU's compute capability, None on a CPU."""

    dtype: str  # one of DTYPES
    device: str  # "cpu", "cuda"
    capability: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One rival.

    rotate(parts, *, interleaved, transposed=False, tables=False) -> None: one to three parts of one dtype and of the
    same T, B and D, last stride 1; x and out are the same memory or share none. Pairs are i and i + d / 2, interleaved
    2 i and 2 i + 1. tables: parts have tables instead of angles. It computes in float32.
    """

    rotate: Callable[..., None]
    unsupported: Callable[[Problem], str | None] = lambda problem: None


_family = plugins.Family(f"{__name__}.backends", "BACKEND", Backend)
names, load = _family.names, _family.load


def check(parts: Sequence[Rotated], tables: bool = False) -> None:
    """Raise ValueError for parts that `rotate` does not support."""
    if not 1 <= len(parts) <= PARTS:
        raise ValueError(f"{len(parts)} parts: 1 to {PARTS}")
    first = parts[0].x
    for x, out, angles in parts:
        sizes = x.dim() == out.dim() == 5 and out.shape == x.shape
        if not sizes or (*x.shape[:2], x.shape[4]) != (*first.shape[:2], first.shape[4]):
            raise ValueError(
                f"x {tuple(x.shape)} -> {tuple(out.shape)} beside {tuple(first.shape)}: all must be (T, B, G, R, D) of the "
                "same T, B and D"
            )
        if any(t.dtype != first.dtype or t.device != first.device for t in (x, out)):
            raise ValueError(f"{x.dtype} -> {out.dtype} on {x.device}: one dtype and device for all, {first.dtype}")
        if any(t.shape[4] > 1 and t.stride(4) != 1 for t in (x, out)):
            raise ValueError(f"strides {x.stride()} -> {out.stride()}: the last must be 1")
        if angles is None:
            continue
        width, odd = divmod(angles.shape[-1], 2 if tables else 1)
        if angles.dim() != 2 or angles.shape[0] < x.shape[0] or width > x.shape[4] or width % 2 or odd:
            wide = "2 d" if tables else "d"
            raise ValueError(
                f"angles {tuple(angles.shape)} of x {tuple(x.shape)}: (T or more, {wide}), d even and at most D"
            )
        if angles.dtype is not torch.float32 or angles.device != x.device:
            raise ValueError(f"angles of {angles.dtype} on {angles.device}: float32 on {x.device}, as x is")
