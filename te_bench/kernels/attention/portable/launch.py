"""Launch attention's portable kernels: tiles, strides, and the number of heads that fit in the L2."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.architecture import Architecture
from te_bench.kernels.launch import launch, traits


class Tile(NamedTuple):
    """A program's tile of rows and keys, with warps and stages; the last two fields are only for FP8's forward pass."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # limit per thread, so that an SM fits one more program
    halves: int = 1  # of the values' features: P V by halves needs registers for one half only

    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.keys, "num_warps": self.warps, "num_stages": self.stages}

    def divides(self, rows: int, keys: int) -> bool:
        return rows % self.rows == 0 and keys % self.keys == 0


class Kept(NamedTuple):
    """The contents of a program: per row (or key) of its own, and per key (or row) of its loop."""

    side: str  # "rows" or "keys": its own
    sums: int  # float32 features per own row
    operands: int  # half-precision features per own row
    loaded: int  # half-precision features per loop row
    scores: int  # tiles of rows x keys at a time, float32


#: A thread's 32-bit registers for sums, operands and scores, if products read registers; the rest of 255 is for
#: addresses, masks and dropout's random numbers. From Triton 3.7's spills for sm_80, sm_89 and sm_120.
AT_HAND = 144
SMALLEST = 32  # fewest rows or keys of a shrunk tile
DRAWN = 2  # tiles of scores' size that dropout needs


def fit(tile: Tile, kept: Kept, here: Architecture) -> Tile:
    """Return the tile, shrunk until this GPU's registers and shared memory hold it; unchanged on Hopper.

    The loop's side is halved before the other one; for lack of shared memory, stages are reduced first.
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
    """Return each tensor's (batch, head, row) strides; a batch of one, as for packed sequences, has stride 0."""
    return tuple(stride for x in tensors for stride in (x.stride(0) if x.shape[0] > 1 else 0, *x.stride()[1:3]))


def heads_in_l2(pairs: int, group: int, length: int, *tensors: Tensor) -> int:
    """Return for how many of `pairs` of sequence and head `length` rows of the tensors fit in 4/5 of the L2; at least
    one.

    tensors: (..., features); `group` heads share them. More than `pairs` would overflow pick_tile's 32-bit product.
    """
    bytes_a_group = length * sum(x.shape[-1] * x.element_size() for x in tensors)
    groups = max(1, architecture.l2_bytes(tensors[0].device) * 4 // 5 // max(1, bytes_a_group))
    return min(groups * group, pairs)


def run(
    kernel: Any,
    grid: int,
    tensors: tuple[Tensor | None, ...],
    integers: tuple[int, ...],
    constants: dict[str, Any],
    floats: tuple[float, ...] = (),
    last: tuple[int, ...] = (),
) -> None:
    """Call kernel[(grid,)](*tensors, *integers, *floats, *last, **constants), on the first tensor's device."""
    assert tensors[0] is not None
    key: tuple[Hashable, ...] = (*traits(*tensors), *integers, *last, *constants.values())
    args = *tensors, *integers, *map(float, floats), *last
    launch(kernel, grid, key, tensors[0].get_device(), args, constants)
