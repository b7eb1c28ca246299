"""Rotary embeddings in Triton: up to three parts in one launch, each read and written once, where they lie.

A program's threads keep the cosines and sines of their positions for all of its heads.
"""

from collections.abc import Sequence

from te_bench.kernels.rotary import DTYPES, Backend, Problem, Rotated, check, kernels
from te_bench.kernels.tile import FLOATS, lacks_triton


def unsupported(p: Problem) -> str | None:
    if reason := lacks_triton(p.device):
        return reason
    if p.dtype not in DTYPES:
        return f"dtype {p.dtype}: fp32, bf16 and fp16 only"
    return None


def rotate(parts: Sequence[Rotated], *, interleaved: bool, transposed: bool = False, tables: bool = False) -> None:
    """Write out = x cos(angles) + rotated(x) sin(angles) for each part, or its transpose; a pair (x, y) rotates to (-y,
    x).

    Shapes and ValueErrors: see rotary.Backend and rotary.check; dtypes are float32, bfloat16 and float16 only.
    """
    check(parts, tables)
    if parts[0].x.dtype not in FLOATS:
        raise ValueError(f"dtype {parts[0].x.dtype}: float32, bfloat16 or float16")
    kernels.rotate(parts, interleaved, transposed, tables)


BACKEND = Backend(rotate=rotate, unsupported=unsupported)
