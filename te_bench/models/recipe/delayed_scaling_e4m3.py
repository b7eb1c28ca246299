"""Delayed scaling, the gradients too in E4M3, which has one bit more of mantissa than E5M2."""

from te_bench.models.recipe._recipe import Format
from te_bench.models.recipe.delayed_scaling import DelayedScaling

ON_REQUEST = True
RECIPE = DelayedScaling(fp8_format=Format.E4M3)
