"""FP8 recipes, one file each, with Transformer Engine's names and rules: `from te_bench.models import recipe`."""

from te_bench import plugins
from te_bench.models.recipe._recipe import Cast, Format, Recipe, Slot, State, largest_of_ranks, saved_names
from te_bench.models.recipe.delayed_scaling import DelayedScaling
from te_bench.models.recipe.float8_block_scaling import Float8BlockScaling
from te_bench.models.recipe.float8_current_scaling import Float8CurrentScaling
from te_bench.models.recipe.mxfp8_block_scaling import MXFP8BlockScaling
from te_bench.models.recipe.nvfp4_block_scaling import NVFP4BlockScaling
from te_bench.models.recipe.rowwise_scaling import RowwiseScaling

__all__ = [
    "Cast",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "RowwiseScaling",
    "Slot",
    "State",
    "largest_of_ranks",
    "load",
    "names",
    "saved_names",
]


_family = plugins.Family(__name__, "RECIPE", Recipe)  # each with its default settings
names, load = _family.names, _family.load
