"""What is counted of a call's collectives."""

import torch
from torch.nn.attention.flex_attention import flex_attention

from te_bench.experiments.instruments import collectives


def test_code_that_is_compiled_within_is_not_followed_and_loses_no_record() -> None:
    q = torch.randn(1, 1, 16, 16)
    assert collectives.of_call(lambda: torch.compile(flex_attention)(q, q, q)) is None
    assert collectives.of_call(lambda: q + q) == []
