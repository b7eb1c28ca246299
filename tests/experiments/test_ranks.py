"""A trial over ranks, by real processes: whatever happens to a rank is one typed row that names it, and no process stays."""

import json
from pathlib import Path
from typing import Any

import pytest
from driving import Run, rows, te_bench

LATE = "came late or never to a collective that the others waited 4 s for"
OTHER = "different parameters, as with experts or blocks that not every token reaches: such a model needs one process"
FAULTS = Path(__file__).with_name("rank_faults.py")


@pytest.fixture(scope="module")
def replies() -> Any:
    """What the supervisor said of each fault, all in one process."""
    run = Run(main=FAULTS)
    done = run.finish()
    assert done.returncode == 0, done.stderr
    assert run.family() == []
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("fault", "outcome", "reason"),
    [
        ("killed", "interrupted", "rank 1: killed from outside (SIGKILL); rerun to repeat it"),
        ("hangs", "crashed", f"rank 1: {LATE}"),
        ("late", "crashed", f"rank 1: {LATE}"),
        ("abort", "crashed", "rank 1: SIGABRT"),
        ("of_nccl", "crashed", "rank 1: DistBackendError: NCCL error in: init.cpp:1, invalid usage. Duplicate GPU"),
        ("waits_by_nccl", "crashed", f"rank 0: {LATE}"),
        ("fail", "crashed", "rank 1: ValueError: no such luck"),
        ("other experts, since=0", "unsupported", f"the ranks' first pass brought them gradients of {OTHER}"),
        (
            "other experts, since=1",
            "unsupported",
            "rank 1: this pass brought gradients of other parameters than the first",
        ),
        ("not a number, check=True", "failed_check", "loss: error nan > "),
        ("not a number, check=False", "diverged", "the loss is not finite"),
    ],
)
def test_a_fault_of_one_rank_is_one_typed_row(replies: Any, fault: str, outcome: str, reason: str) -> None:
    assert replies[fault]["outcome"] == outcome
    assert replies[fault]["reason"].startswith(reason)


def test_a_hanging_rank_is_found_by_the_others_patience(replies: Any) -> None:
    assert replies["hangs"]["work_s"] < 4 + 3 + 8


def test_ranks_wait_for_a_reference_however_long_it_takes_one(replies: Any) -> None:
    assert replies["slow reference"]["outcome"] == "ok", replies["slow reference"]["reason"]
    assert replies["slow reference"]["work_s"] > 2 * 4


@pytest.mark.parametrize(
    ("mode", "seen"), [("ddp", {"allreduce"}), ("fsdp2", {"allgather", "reduce_scatter", "allreduce"})]
)
def test_a_run_divides_its_steps_and_says_so(tmp_path: Path, mode: str, seen: set[str]) -> None:
    """From the command line: the record says over what and by which collectives, and the check held the global batch."""
    command = ("run", "speed", "--device", "cpu", "--model", "tiny", "--batch", "4", "--tokens", "16")
    divided = (
        "--gpus-per-trial",
        "2",
        "--parallel",
        mode,
        "--only",
        f"*V256-{mode}-x2/flash/bf16/*",
        "--out",
        tmp_path,
    )
    done = te_bench(*command, *divided, main=None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"bf16, eager, {mode} x2" in done.stdout
    (step,) = rows(tmp_path)
    assert step["outcome"] == "ok"
    assert {"world": 2, "parallel": mode, "backend": "gloo", "tokens": 4 * 16}.items() <= step["work"].items()
    assert {each["name"].removesuffix("_base") for each in step["work"]["collectives"]} == seen
    gathers = [each["dtype"] for each in step["work"]["collectives"] if "gather" in each["name"]]
    assert gathers == (["bfloat16", "float32"] if mode == "fsdp2" else [])  # of the blocks, and of the tables
    assert {each["dtype"] for each in step["work"]["collectives"] if "reduce" in each["name"]} == {"float32"}
    assert step["check"]["quantities"]
    assert len(step["samples"]["latency_s"]) == 20


@pytest.mark.slow
def test_fsdp2_compiles_block_by_block_and_nothing_twice() -> None:
    done = Run("compiled", main=FAULTS).finish()
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout)
    assert reply["outcome"] == "ok", reply["reason"]
    assert (reply["work"]["graph_breaks"], reply["work"]["recompiles"]) == (0, 0)
    assert reply["work"]["ran"]["compiled"] == 10
    assert reply["work"]["ran"]["gemm_fp8"] == 10 * 4 * 3
