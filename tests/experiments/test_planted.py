"""The faults of a gate's self-test are as large as they say."""

import functools
import statistics

import pytest
import torch

from te_bench.experiments import planted, turns


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("flush", [True, False])
def test_a_planted_slow_down_is_as_large_as_asked_for(flush: bool) -> None:
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def call() -> torch.Tensor:
        return a @ b

    block_of = functools.partial(turns.cuda_block, flush=flush)
    slower = planted.planted(call, "cuda", block_of, slower=0.05)
    one, other = (block_of(each) for each in (call, slower))
    ratios = [statistics.median(other(20)) / statistics.median(one(20)) for _ in range(10)]
    assert statistics.median(ratios) == pytest.approx(1.05, abs=0.015)
