"""Launching attention's portable kernels: tiles, strides, and how many heads the L2 holds."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

from te_bench.kernels import architecture
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
