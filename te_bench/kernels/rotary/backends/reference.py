"""Rotary embeddings in plain PyTorch, in float32. Runs anywhere.

Source: Su et al., "RoFormer", arXiv:2104.09864.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from te_bench.kernels.rotary import Backend, Rotated, check


def rotate(parts: Sequence[Rotated], *, interleaved: bool, transposed: bool = False, tables: bool = False) -> None:
    """Write out = x cos(angles) + rotated(x) sin(angles) for each part, or its transpose; a pair (x, y) rotates to (-y,
    x).

    Shapes and ValueErrors: see rotary.Backend and rotary.check.
    """
    check(parts, tables)
    for x, out, angles in parts:
        made = x
        if angles is not None:
            rows = angles[: x.shape[0], None, None, None]
            cosines, sines = rows.chunk(2, -1) if tables else (rows.cos(), rows.sin())
            made = turned_by(x, cosines, sines, interleaved, transposed)
        if made is not out:
            out.copy_(made)


def turned(x: Tensor, angles: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    """Rotate the first d features of x (..., D) by angles (..., d), which broadcast; returns x's dtype."""
    return turned_by(x, angles.cos(), angles.sin(), interleaved, transposed)


def turned_by(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool, transposed: bool = False) -> Tensor:
    """`turned` by the angles' cosines and sines, with any factor."""
    d = cosines.shape[-1]
    wide = x[..., :d].to(torch.promote_types(x.dtype, torch.float32))
    if transposed:
        y = wide * cosines - rotated(wide * sines, interleaved)
    else:
        y = wide * cosines + rotated(wide, interleaved) * sines
    return torch.cat((y.to(x.dtype), x[..., d:]), -1) if d < x.shape[-1] else y.to(x.dtype)


def rotated(x: Tensor, interleaved: bool) -> Tensor:
    """Return (-y, x) for each pair (x, y) of features."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


BACKEND = Backend(rotate=rotate)
