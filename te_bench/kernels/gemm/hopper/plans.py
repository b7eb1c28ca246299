"""The plans of the Gluon GEMM: a warpgroup's tile, how warpgroups share it, and how it is stored."""

from typing import NamedTuple

import torch
import triton

from te_bench.kernels.architecture import HOPPER_SHARED_MEMORY
from te_bench.kernels.quantize import BLOCK

BARRIERS = 1024  # bytes: more than all barriers need
WARPGROUPS = 2
MOST_STAGES = 6


class Tiling(NamedTuple):
    height: int  # of a warpgroup's tile
    width: int
    turns: bool  # one warpgroup per tile; else two share one of twice the height
    parts: int  # D's parts, stored in sequence: 1, 2 or 4
    slots: int = 1  # parts of each warpgroup's D in shared memory at a time

    def tile(self) -> tuple[int, int]:
        """Return a program's tile."""
        return (self.height if self.turns else WARPGROUPS * self.height), self.width

    def stages(self, itemsize: int) -> int:
        """Return the blocks of K that fit in shared memory beside the parts being stored, of `itemsize` bytes."""
        staging = WARPGROUPS * self.height * (self.width // self.parts) * self.slots * itemsize
        height, width = self.tile()
        return min(MOST_STAGES, (HOPPER_SHARED_MEMORY - BARRIERS - staging) // ((height + width) * BLOCK))

    def programs(self, m: int, n: int, processors: int) -> int:
        height, width = self.tile()
        return min(processors, triton.cdiv(m, height) * triton.cdiv(n, width))


TURNS = Tiling(128, 128, True, 2)
PROMOTED = Tiling(128, 128, False, 2)  # two accumulators of 128 x 128 do not fit, one and a half do
# Halves of 128 x 128 of an activation and its input would not fit in registers.
ACTIVATED = TURNS._replace(parts=4, slots=2)
GRADIENT = TURNS._replace(slots=2)  # all of the activation's input arrives before the product


def plan(out_dtype: torch.dtype, *, promote: bool) -> Tiling:
    """Return the fastest plan for D alone."""
    usual = PROMOTED if promote else TURNS
    return usual._replace(parts=4) if out_dtype is torch.float32 else usual
