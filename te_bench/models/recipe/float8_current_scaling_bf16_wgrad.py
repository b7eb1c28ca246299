"""Per-tensor current scaling, but the weight gradient is bf16's, of what was not cast."""

from te_bench.models.recipe.float8_current_scaling import Float8CurrentScaling

ON_REQUEST = True
FP8_HEAD = False
RECIPE = Float8CurrentScaling(bf16_wgrad=True)
