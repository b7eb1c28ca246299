"""Per-tensor current scaling, but the first sixth of the blocks stays in bf16."""

from te_bench.models.recipe.float8_current_scaling import Float8CurrentScaling

ON_REQUEST = True
RECIPE = Float8CurrentScaling(bf16_first=1 / 6)
