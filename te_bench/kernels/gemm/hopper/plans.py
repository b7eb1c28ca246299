"""Which tile a warpgroup of the Gluon GEMM makes, with whom, and how it leaves through shared memory."""

from typing import NamedTuple

import torch
import triton

from te_bench.kernels.architecture import HOPPER_SHARED_MEMORY
from te_bench.kernels.quantize import BLOCK

BARRIERS = 1024  # bytes: of them, more than all barriers take
WARPGROUPS = 2
MOST_STAGES = 6


class Plan(NamedTuple):
    height: int  # of a warpgroup's tile
    width: int
    turns: bool  # a tile is one warpgroup's; else two share one of twice the height
    parts: int  # in which D leaves, one after the other: 1, 2 or 4
    slots: int = 1  # parts of each warpgroup's D in shared memory at a time

    def tile(self) -> tuple[int, int]:
        """Of a program."""
        return (self.height if self.turns else WARPGROUPS * self.height), self.width

    def stages(self, itemsize: int) -> int:
        """Blocks of K that fit in shared memory beside the parts of what leaves, so many bytes of each element."""
        staging = WARPGROUPS * self.height * (self.width // self.parts) * self.slots * itemsize
        height, width = self.tile()
        return min(MOST_STAGES, (HOPPER_SHARED_MEMORY - BARRIERS - staging) // ((height + width) * BLOCK))

    def programs(self, m: int, n: int, processors: int) -> int:
        height, width = self.tile()
        return min(processors, triton.cdiv(m, height) * triton.cdiv(n, width))


TURNS = Plan(128, 128, True, 2)
PROMOTED = Plan(128, 128, False, 2)  # two accumulators of 128 x 128 do not fit, one and a half do
# An activation and its input: halves of 128 x 128 would not fit in the registers.
ACTIVATED = TURNS._replace(parts=4, slots=2)
GRADIENT = TURNS._replace(slots=2)  # all of the activation's input is there before the product is


def plan(out_dtype: torch.dtype, *, promote: bool) -> Plan:
    """The fastest for D alone."""
    usual = PROMOTED if promote else TURNS
    return usual._replace(parts=4) if out_dtype is torch.float32 else usual
