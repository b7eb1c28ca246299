"""The recipes that keep no part out of FP8 on purpose: what holds of these holds of the others, whose parts have tests."""

from te_bench.models import recipe

WHOLE = [name for name in recipe.names() if not (recipe.load(name).keeps_blocks or recipe.load(name).bf16_wgrad)]
