"""NVFP4 as it was trained with: the last sixth of the blocks stays in bf16 (arXiv:2509.25149 keeps 16 % of the Linears)."""

from te_bench.models.recipe.nvfp4_block_scaling import NVFP4BlockScaling

ON_REQUEST = True
FP8_HEAD = False
RECIPE = NVFP4BlockScaling(bf16_last=1 / 6)
