"""Per-tensor current scaling, the gradients too in E4M3, which has one bit more of mantissa than E5M2."""

from te_bench.models.recipe._recipe import Format
from te_bench.models.recipe.float8_current_scaling import Float8CurrentScaling

ON_REQUEST = True
RECIPE = Float8CurrentScaling(fp8_format=Format.E4M3)
