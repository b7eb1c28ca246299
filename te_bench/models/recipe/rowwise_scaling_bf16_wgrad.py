"""Row-wise current scaling, but the weight gradient is bf16's, of what was not cast (torchao's rowwise_with_gw_hp)."""

from te_bench.models.recipe.rowwise_scaling import RowwiseScaling

ON_REQUEST = True
FP8_HEAD = False
RECIPE = RowwiseScaling(bf16_wgrad=True)
