"""te.TransformerLayer as a whole."""

import pytest
import torch
from torch import Tensor

import te_bench.models as te

LAYERS = {
    "encoder": {},
    "decoder": {"layer_type": "decoder"},
    "parallel": {"parallel_attention_mlp": True},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_of_all_leaves_the_residual_stream(kind: str) -> None:
    """Every branch goes through it: attention's, attention's to an encoder, the MLP's."""
    layer = te.TransformerLayer(32, 64, 4, hidden_dropout=1.0, attention_dropout=0.0, device="cpu", **LAYERS[kind])
    x = torch.randn(6, 2, 32)
    options: dict[str, Tensor] = {"encoder_output": torch.randn(5, 2, 32)} if kind == "decoder" else {}
    assert torch.equal(layer(x, **options), x)
    assert not torch.equal(layer.eval()(x, **options), x)
