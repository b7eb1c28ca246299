"""What a step keeps in FP8, of weights and of all else, by passes no larger than the rank's own rows."""

from typing import Any

import pytest
import torch

from te_bench.experiments import trial_model
from te_bench.experiments.instruments import ledger
from te_bench.experiments.spec import Trial
from te_bench.experiments.suite_trials import BENCH_PY


def kept(batch: int, block: int = 64) -> tuple[dict[str, float], int]:
    """The ledger of a step on so many rows, and the most tokens that a pass had."""
    problem = {**BENCH_PY, "model": "tiny", "batch": batch, "block": block, "vocab": 250, "padded_vocab": 256}
    how: dict[str, Any] = {"attention": "flash", "precision": "fp8", "recipe": "delayed_scaling"}
    trial = Trial(workload="scaling", device="cpu", problem=problem, **how)
    step = trial_model.step_of(trial)
    tokens = torch.zeros(batch, block, dtype=torch.int64)
    seen: list[int] = []
    step.model.register_forward_pre_hook(lambda model, given: seen.append(given[0].numel()))
    return ledger.of_step(trial, step, tokens, tokens), max(seen, default=0)


def test_one_row_is_counted_by_passes_of_no_more_and_comes_to_a_part_of_several() -> None:
    one, most = kept(1)
    three, most_of_three = kept(3)
    assert (most, most_of_three) == (64, 2 * 64)
    assert one["fp8_copies"] == three["fp8_copies"] == 2 * 12 * 64**2  # of two layers, a byte a weight
    assert one["fp8_operands"] == three["fp8_operands"] / 3 == 64 * 2 * 7 * 64  # inputs of C, C, C and 4 C features


@pytest.mark.parametrize("block", [24])
def test_one_row_that_does_not_halve_is_not_counted(block: int) -> None:
    found, most = kept(1, block)
    assert found.keys() == {"weights", "gradients", "states"}
    assert most == 0
