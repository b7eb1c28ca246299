"""Float8CurrentScaling(fp8_dpa=True): per-tensor current scaling, and attention in FP8 with a scale a head."""

from te_bench.models.recipe.float8_current_scaling import Float8CurrentScaling

ON_REQUEST = True
RECIPE = Float8CurrentScaling(fp8_dpa=True)
