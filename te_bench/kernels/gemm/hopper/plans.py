"""Which tile a warpgroup of the Gluon GEMM makes, with whom, and how its epilogue passes through shared memory."""

from typing import NamedTuple

import torch
import triton

from te_bench.kernels.architecture import HOPPER_SHARED_MEMORY
from te_bench.kernels.gemm import Epilogue
from te_bench.kernels.quantize import BLOCK

BARRIERS = 1024  # bytes: of them, more than all barriers take, and of Triton's reductions
WARPGROUPS = 2
MOST_STAGES = 6
# A block of K is given back when the next one's products are under way.
FEWEST_STAGES = 2


class Plan(NamedTuple):
    height: int  # of a warpgroup's tile
    width: int
    turns: bool  # a tile is one warpgroup's; else two share one of twice the height
    parts: int  # in which D leaves, one after the other: 1, 2, 4 or 8
    slots: int = 1  # parts of each warpgroup's D in shared memory at a time

    def tile(self) -> tuple[int, int]:
        """Of a program."""
        return (self.height if self.turns else WARPGROUPS * self.height), self.width

    def stages(self, out_dtype: torch.dtype, epilogue: Epilogue, residual: torch.Tensor | None) -> int:
        """Blocks of K that fit beside the parts of D in shared memory."""
        e, wide, fp8 = epilogue, out_dtype.itemsize, epilogue.target is not None
        out = wide if e.out or (fp8 and e.columnwise) else 0
        slots = self.slots * (wide * e.keep + ((e.rowwise + e.columnwise) if fp8 else 0))
        if residual is None:
            slots += self.slots * out
        else:  # all of it, and out in its place or beside it
            slots += self.parts * residual.dtype.itemsize + (0 if residual.dtype is out_dtype else self.slots * out)
        staging = WARPGROUPS * self.height * (self.width // self.parts) * slots
        height, width = self.tile()
        return min(MOST_STAGES, (HOPPER_SHARED_MEMORY - BARRIERS - staging) // ((height + width) * BLOCK))


TURNS = Plan(128, 128, True, 2)
# An activation and its input: halves of 128 x 128 would not fit in the registers.
TWO_OUT = TURNS._replace(parts=4, slots=2)
HALVES = Plan(64, 256, False, 4, 2)
PROMOTED = Plan(128, 128, False, 2)  # two accumulators of 128 x 128 do not fit, one and a half do
SUM, SUM_PROMOTED = Plan(128, 128, True, 4, 2), Plan(128, 128, False, 4)
SUM_HALVES = Plan(64, 256, False, 8)
# The least share of the processors' time that whole tiles must use to beat tiles that several programs share: on an H200
# they do at 0.82, and do not at 0.55.
WHOLE = 0.8


def plan(out_dtype: torch.dtype, *, promote: bool, epilogue: Epilogue, residual: torch.Tensor | None = None) -> Plan:
    """The fastest that fits. Raises ValueError where none does."""
    usual = PROMOTED if promote else TURNS
    usual = usual._replace(parts=4) if out_dtype is torch.float32 else usual
    for p in (usual, usual._replace(parts=4), usual._replace(parts=8)):
        if p.stages(out_dtype, epilogue, residual) >= FEWEST_STAGES:
            return p
    raise ValueError(
        f"a residual in {None if residual is None else residual.dtype} beside an out in {out_dtype} leaves the operands no "
        "shared memory: give the residual in out's type, or take triton"
    )


def plan_sum(m: int, n: int, *, promote: bool, whole: bool, processors: int) -> tuple[Plan, bool]:
    """How to add to (M, N): the fastest plan measured for so many tiles, and whether each is one program's.

    whole: it must be.
    """
    if promote:
        return SUM_PROMOTED, whole
    height, width = SUM.tile()
    tiles = triton.cdiv(m, height) * triton.cdiv(n, width)
    used = tiles / (triton.cdiv(tiles, processors) * processors)
    if whole or used >= WHOLE:
        return SUM, True
    return (SUM_HALVES if 2 * tiles > processors else SUM), False


def programs(p: Plan, m: int, n: int, processors: int) -> int:
    height, width = p.tile()
    return min(processors, triton.cdiv(m, height) * triton.cdiv(n, width))
