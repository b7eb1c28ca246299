"""N ranks compute what one process computes of the same global batch: loss, gradients, norm, and a course of 50 steps."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from te_bench.training import parallel

CASES = Path(__file__).with_name("rank_cases.py")
MODES = ("ddp", "fsdp2")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> Any:
    """What rank 0 of so many found: one launch for all tests."""
    done = subprocess.run(
        [sys.executable, str(CASES), str(request.param)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout)
    assert reply["outcome"] == "ok", reply["reason"]
    return reply["found"]


def test_every_mode_is_tried() -> None:
    assert parallel.names() == sorted(MODES)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_that_of_the_global_batch_to_rounding(found: Any, mode: str, accumulate: int) -> None:
    """In float64, clipped, from weights that only rank 0 had."""
    errors = found[mode][f"accumulate {accumulate}"]
    assert all(error <= 1e-12 for error in errors.values()), errors


@pytest.mark.parametrize("mode", MODES)
def test_fifty_steps_are_those_of_one_process_that_accumulates_the_same_slices(found: Any, mode: str) -> None:
    """AdamW divides by the root of squares, which makes 1e-16 of a gradient that is nearly 0 more: hence not 1e-12."""
    ours, slices = found[mode]["losses"]
    assert len(ours) == 50
    assert ours == pytest.approx(slices, rel=1e-10)
    assert found[mode]["weights"] <= 1e-8


@pytest.mark.parametrize("mode", MODES)
def test_a_user_s_blocks_lie_in_lists_of_lists(found: Any, mode: str) -> None:
    assert found["nested"][mode] <= 1e-12


def test_no_rank_of_any_seed_draws_the_masks_of_another(found: Any) -> None:
    assert len(set(found["seeds"])) == len(found["seeds"])


def test_ddp_sends_each_gradient_once(found: Any) -> None:
    said = found["ddp"]["collectives"]
    assert said == [
        {"name": "allreduce", "dtype": "float64", "times": 2, "bytes": found["ddp"]["bytes"] + 8}  # the loss, too
    ]


@pytest.mark.parametrize("optimizer", ["None", "reference"])
def test_ddp_sends_buckets_while_the_backward_pass_goes_on(found: Any, optimizer: str) -> None:
    """With the optimizer that computes with copies of the weights, too, whose gradients are bf16's."""
    said = found["buckets"][optimizer]
    assert said["during"] > 3
    assert 1 <= said["after"] <= 4  # the loss, what was left of a bucket, and tables that a head shares
    assert said["error"] < 2**-6


def test_fsdp2_gathers_matrices_and_scatters_their_gradients(found: Any) -> None:
    """Blocks are gathered for either pass, the tables once; vectors are whole in every rank."""
    said = {each["name"]: each for each in found["fsdp2"]["collectives"]}
    matrices = found["fsdp2"]["bytes"] - found["fsdp2"]["vector_bytes"]
    assert said["reduce_scatter_base"]["bytes"] == matrices
    assert said["allgather_base"]["bytes"] == 2 * matrices - found["fsdp2"]["table_bytes"]
    assert said["allreduce"]["bytes"] == found["fsdp2"]["vector_bytes"] + 8  # the loss
    assert {each["dtype"] for each in said.values()} == {"float64"}


def test_a_checkpoint_of_ranks_is_that_of_their_whole_weights(found: Any) -> None:
    for mode in MODES:
        assert found[mode]["saved"] is True


@pytest.mark.parametrize("mode", MODES)
def test_delayed_scaling_has_the_same_scales_in_every_rank(found: Any, mode: str) -> None:
    """And the same weights; with ddp the fused blocks and the table of weights that are cast in the update, too."""
    said = found["fp8"][mode]
    assert said["scales"] == 2 * 2 * 4  # either direction of four Linears in two blocks
    assert said["alike"]
    assert said["losses"] == pytest.approx(said["one"], rel=4e-3)  # e4m3's own noise: 2^-4 of single elements
