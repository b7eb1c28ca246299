"""Per-tensor current scaling, but the last sixth of the blocks stays in bf16."""

from te_bench.models.recipe.float8_current_scaling import Float8CurrentScaling

ON_REQUEST = True
FP8_HEAD = False
RECIPE = Float8CurrentScaling(bf16_last=1 / 6)
