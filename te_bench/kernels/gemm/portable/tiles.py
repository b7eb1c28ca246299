"""Which tile of D a program of the Triton GEMM makes at a time, and how many share the work along K."""

from typing import NamedTuple

import torch
import triton

from te_bench.kernels.gemm import Epilogue
from te_bench.kernels.quantize import BLOCK

SPLITS = range(1, 17)
# What a tile costs beside its K, in blocks of 128 of K: a guess from the epilogue's bytes, not a measurement.
TILE_COST = 4


class Tile(NamedTuple):
    m: int
    n: int
    warps: int
    stages: int
    parts: int  # in which D leaves, one after the other: 1, 2 or 4
    speed: float  # of a full wave, relative
    programs: int = 1  # on a processor at a time


# A 128 x 256 tile reads a third less of L2 for the same product, but leaves a ragged last wave; its four stages of 48 KB
# and half of a 2-byte D fill 224 of 227 KB. Speeds of full waves: a guess from the bytes per product, not a measurement.
LARGE, SMALL = Tile(128, 256, 8, 4, 2, 1.0), Tile(128, 128, 8, 4, 1, 0.88)
LARGE_FLOAT32 = LARGE._replace(stages=3)  # D takes twice the shared memory, 64 KB
# Promotion to float32 needs a second accumulator: 128 x 256 spills, 128 x 128 does not.
PRECISE = SMALL

# With an epilogue, as ptxas compiles it for sm_90a: a quarter of a large tile at a time leaves room for four stages, and a
# residual takes one of them. What a GELU and the FP8 of a large tile need spills; two programs of 128 x 128 do not, and an
# epilogue, as long as six blocks of K, runs beside the other program's product.
FUSED_LARGE, FUSED_SMALL = LARGE._replace(parts=4), SMALL._replace(parts=2)
FUSED_LARGE_FLOAT32 = FUSED_LARGE._replace(stages=3)
FUSED_TWICE = Tile(128, 128, 4, 3, 4, 0.88, programs=2)
# Block scales of both operands and an epilogue spill at 128 x 128.
FUSED_BLOCKS = Tile(64, 128, 4, 3, 4, 0.75, programs=2)


def tile(
    m: int,
    n: int,
    out_dtype: torch.dtype,
    *,
    promote: bool,
    processors: int,
    kind: str = "tensor",
    epilogue: Epilogue | None = None,
) -> Tile:
    """The tile that finishes (M, N) first, counting waves of one tile a processor; kind: the granularity of a's scales.

    12288 x 768 on 132 processors: 288 large tiles take 3 waves of 2.2, 576 small ones 5 of 4.4, which is less.
    """
    plain = epilogue is None or epilogue == Epilogue()
    if kind in ("block", "tile"):
        return PRECISE if plain else FUSED_BLOCKS
    if promote:
        return PRECISE if plain else FUSED_SMALL
    float32 = out_dtype is torch.float32
    if epilogue is None or plain:
        large, small = LARGE_FLOAT32 if float32 else LARGE, SMALL
    elif epilogue.target is not None and epilogue.residual:
        return FUSED_SMALL  # row scales spill in a large tile, and there is no room for two
    elif epilogue.target is not None and epilogue.activation is not None:
        return FUSED_SMALL if epilogue.out or kind == "row" else FUSED_TWICE  # the former spill there too
    else:
        large, small = FUSED_LARGE_FLOAT32 if float32 or epilogue.residual else FUSED_LARGE, FUSED_SMALL
    return min(large, small, key=lambda t: _time(t, triton.cdiv(m, t.m) * triton.cdiv(n, t.n), 1, processors))


def split(m: int, n: int, k: int, *, promote: bool, processors: int) -> tuple[Tile, int]:
    """The tile, and the shares of K, that add a product to (M, N) first; only so many shares that none is empty.

    3072 x 768 of K = 12288 on 132 processors: 72 large tiles of 96 blocks of K would leave 60 processors idle for all of
    it; 216 of 32 blocks are two waves, 72 (with TILE_COST) instead of 100.
    """
    blocks = triton.cdiv(k, BLOCK)

    def time(choice: tuple[Tile, int]) -> float:
        t, shares = choice
        tiles = triton.cdiv(m, t.m) * triton.cdiv(n, t.n) * shares
        return _time(t, tiles, triton.cdiv(blocks, shares) + TILE_COST, processors)

    legal = [s for s in SPLITS if triton.cdiv(blocks, triton.cdiv(blocks, s)) == s]
    return min(((t, s) for t in ((PRECISE,) if promote else (LARGE_FLOAT32, SMALL)) for s in legal), key=time)


def _time(t: Tile, tiles: int, each: int, processors: int) -> float:
    """Of so many tiles, `each` the cost of one for its size, in no unit."""
    return float(triton.cdiv(tiles, processors) * each * t.m * t.n / t.speed)
