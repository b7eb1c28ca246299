"""Launching attention's portable kernels: tiles, strides, and how many heads the L2 holds."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.architecture import Architecture
from te_bench.kernels.launch import launch, traits


class Tile(NamedTuple):
    """A program's rows and keys, and how it works on them; the last two fields are of FP8's forward pass alone."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # a thread's at most, so that one more program fits on a processor
    halves: int = 1  # of the values' features: P V a half at a time keeps a half's product in registers

    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.keys, "num_warps": self.warps, "num_stages": self.stages}

    def divides(self, rows: int, keys: int) -> bool:
        return rows % self.rows == 0 and keys % self.keys == 0


class Kept(NamedTuple):
    """What a program has at hand: of each row, or key, that it stays at, and of each that its loop passes by."""

    side: str  # "rows" or "keys", where it stays
    sums: int  # float32 features of each
    operands: int  # half-precision features of each
    loaded: int  # half-precision features of each of the loop's
    scores: int  # tiles of rows x keys at a time, float32


#: A thread's 32-bit registers for sums, operands and scores, where products read registers: of 255, the rest is for
#: addresses, masks and dropout's random numbers. By what Triton 3.7 spills for sm_80, sm_89 and sm_120.
AT_HAND = 144
SMALLEST = 32  # rows or keys of a tile that is made smaller
DRAWN = 2  # tiles of scores' size that dropout takes besides


def fit(tile: Tile, kept: Kept, here: Architecture) -> Tile:
    """The tile, or the part of it that this GPU's registers and shared memory hold; on Hopper the tile itself.

    Its loop's side is halved before the other one, and stages go first where shared memory is too small.
    """
    stays, passes = kept.side, "keys" if kept.side == "rows" else "rows"

    def sizes() -> tuple[int, int]:
        return (tile.rows, tile.keys) if stays == "rows" else (tile.keys, tile.rows)

    def registers() -> float:
        each, other = sizes()
        return each * (kept.sums + kept.operands / 2 + kept.scores * other) / (32 * tile.warps)

    def shared() -> int:
        each, other = sizes()
        return 2 * (each * kept.operands + tile.stages * other * kept.loaded)

    for side, at in ((passes, 1), (stays, 0)):
        while here.products_from_registers and registers() > AT_HAND and sizes()[at] > SMALLEST:
            tile = tile._replace(**{side: sizes()[at] // 2})
    while shared() > here.shared_memory and tile.stages > 1:
        tile = tile._replace(stages=tile.stages - 1)
    assert shared() <= here.shared_memory, (
        f"{tile} needs {shared()} bytes of shared memory, there are {here.shared_memory}"
    )
    return tile


def row_strides(*tensors: Tensor) -> tuple[int, ...]:
    """(batch, head, row) strides of each; a batch of one, which packed sequences are, has stride 0."""
    return tuple(stride for x in tensors for stride in (x.stride(0) if x.shape[0] > 1 else 0, *x.stride()[1:3]))


def heads_in_l2(length: int, *tensors: Tensor) -> int:
    """Of how many heads `length` rows of the tensors, (..., features), fit in four fifths of the L2; at least one."""
    bytes_a_head = length * sum(x.shape[-1] * x.element_size() for x in tensors)
    return max(1, architecture.l2_bytes(tensors[0].device) * 4 // 5 // max(1, bytes_a_head))


def run(
    kernel: Any,
    grid: int,
    tensors: tuple[Tensor | None, ...],
    integers: tuple[int, ...],
    constants: dict[str, Any],
    floats: tuple[float, ...] = (),
    last: tuple[int, ...] = (),
) -> None:
    """kernel[(grid,)](*tensors, *integers, *floats, *last, **constants), on the first tensor's device."""
    assert tensors[0] is not None
    key: tuple[Hashable, ...] = (*traits(*tensors), *integers, *last, *constants.values())
    args = *tensors, *integers, *map(float, floats), *last
    launch(kernel, grid, key, tensors[0].get_device(), args, constants)
