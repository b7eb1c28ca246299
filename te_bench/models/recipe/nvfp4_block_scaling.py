"""NVFP4, Blackwell's: 4-bit elements in blocks of 16 with E4M3 scales; on other devices emulated exactly, by bf16 GEMMs."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from te_bench.kernels.gemm import block_formats
from te_bench.kernels.quantize import Operand, Quantized, block_casts
from te_bench.kernels.quantize.block_formats import NVFP4_BLOCK
from te_bench.models.recipe._recipe import Format, Recipe, Slot, add_rows

LARGEST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """E2M1 elements, an E4M3 scale per 16 of them along the GEMM's contracted dimension, a float32 scale per tensor.

    Gradients are rounded stochastically, with bytes of torch's device generator; x and dy are Hadamard-transformed by
    16 tokens for wgrad; a weight's blocks are 16 x 16, shared by both orientations. disable_stochastic_rounding,
    disable_rht and disable_2d_quantization switch these off. Casts are in bf16, and save two bytes an element for the
    backward pass. Blackwell's tensor cores multiply them (kernels/gemm/block_scaled.py, never run), elsewhere bf16
    GEMMs. emulate=True casts in plain PyTorch, and multiplies in bf16 anywhere. Raises ValueError for impossible
    settings. Source: Transformer Engine, NVFP4BlockScaling; arXiv:2509.25149.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    fp8_format: Format = field(default=Format.E4M3, kw_only=True)
    fp8_dpa: bool = field(default=False, kw_only=True)
    fp8_mha: bool = field(default=False, kw_only=True)

    granularity: ClassVar[str] = "nvfp4"
    block_formats: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_format(legal=(Format.E4M3,))
        self._reject(
            self.row_scaled_activation, "row_scaled_activation", "te_bench has one amax a tensor; leave it False"
        )
        self._reject(self.nvfp4_4over6 != "none", "nvfp4_4over6", "'none'; the others are for post-training")
        for name in ("fp8_dpa", "fp8_mha"):
            self._reject(getattr(self, name), name, "attention is in the activations' precision")

    @classmethod
    def nvfp4(cls) -> bool:
        return True

    def quantize(
        self, x: Tensor, role: str, slot: Slot, *, rowwise: bool, columnwise: bool, column_sum: Tensor | None = None
    ) -> Quantized:
        if column_sum is not None:
            add_rows(x, column_sum)
        weight, seed = role == "weight", None
        if role == "grad_output" and not self.disable_stochastic_rounding:
            seed = torch.randint(LARGEST, (), dtype=torch.int64, device=x.device)
        return block_casts.nvfp4(
            x,
            rows=NVFP4_BLOCK if weight and not self.disable_2d_quantization else 1,
            rowwise=rowwise,
            columnwise=columnwise,
            transform=not (weight or self.disable_rht),
            seed=seed,
            counts=slot.counts,
            portable=self.emulate,
        )

    def gemm(self, a: Operand, b: Operand, gemm: str, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        return block_formats.forward(a, b, out_dtype=out_dtype, bias=bias, emulate=self.emulate)


ON_REQUEST = True
RECIPE = NVFP4BlockScaling()
