"""The tile of D that a program of the Triton GEMM computes at a time."""

from typing import NamedTuple

import torch
import triton

from te_bench.kernels.architecture import ARCHITECTURES, HOPPER, Architecture
from te_bench.kernels.quantize import BLOCK


class Tile(NamedTuple):
    m: int
    n: int
    warps: int
    stages: int
    parts: int  # D's parts, stored in sequence: 1, 2 or 4
    speed: float  # of a full wave, relative


# A 128 x 256 tile reads a third less from L2 but leaves a ragged last wave; its four stages of 48 KB and half of a
# 2-byte D fill 224 of 227 KB. Speeds of full waves are guessed from bytes per product, not measured.
LARGE, SMALL = Tile(128, 256, 8, 4, 2, 1.0), Tile(128, 128, 8, 4, 1, 0.88)
LARGE_FLOAT32 = LARGE._replace(stages=3)  # D takes twice the shared memory, 64 KB
# Promotion to float32 needs a second accumulator: 128 x 256 spills, 128 x 128 does not.
PRECISE = SMALL


#: For tensor memory: each 128 of K moves sums from there to registers.
PRECISE_FROM_MEMORY = PRECISE._replace(m=64, warps=4)
FEWEST_BUFFERS = 2
BARRIERS = 1024  # bytes, and a row of scales


def tile(
    m: int, n: int, out_dtype: torch.dtype, *, promote: bool, processors: int, kind: str = "tensor",
    here: Architecture = ARCHITECTURES[HOPPER],
) -> Tile:  # fmt: skip
    """Return the tile that finishes (M, N) first, in waves of one tile an SM; kind: the granularity of a's scales.

    For 12288 x 768 on 132 SMs, 288 large tiles take 3 waves of 2.2, 576 small ones 5 of 4.4, which is less. For lack of
    shared memory a tile gets more parts, then fewer stages, then is dropped.
    """
    if promote or kind in ("block", "tile"):
        usual = [PRECISE_FROM_MEMORY if here.tensor_memory else PRECISE]
    else:
        usual = [LARGE_FLOAT32 if out_dtype is torch.float32 else LARGE, SMALL]

    def time(t: Tile) -> float:
        return float(triton.cdiv(triton.cdiv(m, t.m) * triton.cdiv(n, t.n), processors) * t.m * t.n / t.speed)

    fitting = [t for t in (_fit(each, out_dtype.itemsize, here) for each in usual) if t is not None]
    assert fitting, f"no tile of the GEMM fits into {here.shared_memory} bytes of shared memory"
    return min(fitting, key=time)


def _fit(t: Tile, itemsize: int, here: Architecture) -> Tile | None:
    """Return the tile with as many stages, and as few parts, as fit in shared memory; None without two buffers."""
    # Operands read from registers leave their buffer before the product; sums from tensor memory pass through shared
    # memory before they become a part of D.
    early, copies = here.products_from_registers, 2 if here.tensor_memory else 1
    for stages in range(t.stages, FEWEST_BUFFERS + early - 1, -1):
        for parts in (parts for parts in (1, 2, 4) if parts >= t.parts):
            needed = (stages - early) * (t.m + t.n) * BLOCK + copies * (t.m * t.n // parts) * itemsize
            if needed + BARRIERS <= here.shared_memory:
                return t._replace(stages=stages, parts=parts)
    return None
