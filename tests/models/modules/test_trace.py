"""torch.jit.trace takes te's modules outside of te.autocast, and FP8 is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_bench.models as te
from te_bench.models import recipe

MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **o: te.Linear(32, 32, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(32, 32, normalization="RMSNorm", **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(32, 48, activation="swiglu", **o),
    "TransformerLayer": lambda **o: te.TransformerLayer(32, 48, 4, **o),
    "GQA": lambda **o: te.TransformerLayer(32, 48, 4, num_gqa_groups=2, self_attn_mask_type="no_mask", **o),
    "window": lambda **o: te.TransformerLayer(32, 48, 4, window_size=(3, 0), **o),
}
pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("module", MODULES)
def test_a_traced_module_is_the_same_function(module: str, device: str) -> None:
    layer = MODULES[module](device=device).eval()
    x, y = (torch.randn(8, batch, 32, device=device) for batch in (2, 3))
    with torch.no_grad():
        traced = torch.jit.trace(layer, (x,), check_trace=False)
        torch.testing.assert_close(traced(y), layer(y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("asked", [recipe.DelayedScaling(), recipe.Float8CurrentScaling()])
@pytest.mark.parametrize("module", MODULES)
def test_fp8_is_refused(module: str, asked: Any) -> None:
    layer = MODULES[module](device="cpu").eval()
    with te.autocast(recipe=asked):
        layer(torch.ones(8, 2, 32))
        with pytest.raises(ValueError, match=r"torch.jit.trace records no FP8: trace the model outside of te.autocast"):
            torch.jit.trace(layer, (torch.ones(8, 2, 32),))
