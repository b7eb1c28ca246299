"""MXFP8, Blackwell's: blocks of 32 with scales that are powers of two; on other devices emulated exactly, by bf16 GEMMs."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from te_bench.kernels.gemm import block_formats
from te_bench.kernels.quantize import Operand, Quantized, block_casts
from te_bench.kernels.quantize.block_formats import MXFP8_BLOCK
from te_bench.models.recipe._recipe import Format, Recipe, Slot, add_rows


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """scale of 32 elements along the GEMM's contracted dimension = amax / FP8_MAX rounded up to a power of two.

    E4M3 by default; Format.HYBRID has E5M2 gradients. enable_2d_quantization: a weight's blocks are 32 x 32, shared by
    both orientations. Casts are in bf16, and save two bytes an element for backward. Blackwell's tensor cores multiply
    them (kernels/gemm/block_scaled.py, never run), elsewhere bf16 GEMMs. emulate=True casts in plain PyTorch, and
    multiplies in bf16 anywhere. Raises ValueError for impossible settings.
    Source: Transformer Engine, MXFP8BlockScaling; arXiv:2506.08027.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    enable_2d_quantization: bool = field(default=False, kw_only=True)

    granularity: ClassVar[str] = "mxfp8"
    block_formats: ClassVar[bool] = True
    power_of_two = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_format(legal=(Format.E4M3, Format.HYBRID))
        self._reject(self.margin != 0, "margin", "MXFP8 has none; leave it at 0")
        for name in ("fp8_dpa", "fp8_mha"):
            self._reject(getattr(self, name), name, "attention is in the activations' precision")

    @classmethod
    def mxfp8(cls) -> bool:
        return True

    def quantize(
        self, x: Tensor, role: str, slot: Slot, *, rowwise: bool, columnwise: bool, column_sum: Tensor | None = None
    ) -> Quantized:
        if column_sum is not None:
            add_rows(x, column_sum)
        square = role == "weight" and self.enable_2d_quantization
        return block_casts.mxfp8(
            x,
            self.dtype(role),
            rows=MXFP8_BLOCK if square else 1,
            rowwise=rowwise,
            columnwise=columnwise,
            counts=slot.counts,
            portable=self.emulate,
        )

    def gemm(self, a: Operand, b: Operand, gemm: str, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        of_a = self.dtype("input" if gemm == "fprop" else "grad_output")
        return block_formats.forward(a, b, out_dtype=out_dtype, bias=bias, a_dtype=of_a, emulate=self.emulate)


ON_REQUEST = True
RECIPE = MXFP8BlockScaling()
