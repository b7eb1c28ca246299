"""The peak of a CPU's memory: what was freed before is none of it."""

import torch

from te_bench.experiments.instruments import memory


def test_what_was_freed_before_counts_for_nothing() -> None:
    """Blocks below 128 KiB lie in malloc's heap, which ends after the last that is held."""
    memory.reset("cpu")
    (before,) = memory.peak("cpu")["peak_rss_bytes"]
    blocks = [torch.ones(16 * 1024) for _ in range(2000)]  # 64 KiB each
    held = blocks[-1]
    (highest,) = memory.peak("cpu")["peak_rss_bytes"]
    assert highest > before + 100 * 2**20
    del blocks
    memory.reset("cpu")
    (after,) = memory.peak("cpu")["peak_rss_bytes"]
    assert after < before + 20 * 2**20
    assert held.sum() == 16 * 1024
