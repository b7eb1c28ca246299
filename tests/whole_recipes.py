"""The recipes that keep no part out of FP8 on purpose: what holds of these holds of the others, whose parts have tests."""

from te_bench.models import recipe

COVERED = ("delayed_scaling_e4m3",)  # by delayed_scaling's scales and float8_current_scaling_e4m3's gradients
WHOLE = [
    name
    for name in recipe.names()
    if name not in COVERED and not (recipe.load(name).keeps_blocks or recipe.load(name).bf16_wgrad)
]
