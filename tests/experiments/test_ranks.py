"""A trial over ranks, by real processes: whatever happens to a rank is one typed row that names it, and no process stays."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from driving import Run, rows, te_bench

BF16 = "gather fp8: a step is to gather 98,304 bytes of uint8; this one gathered 196,608 bytes of bfloat16"
TOKENS = (
    "sequence parallelism: a step is to gather 0 to 8,192 bytes of float32; this one gathered 4,096 bytes of bfloat16"
)
ENGINE = "rival transformer_engine_current: a step is to gather 8,192 to 16,384 bytes of uint8; this one gathered "
LATE = "came late or never to a collective that the others waited 4 s for"
OTHER = "different parameters, as with experts or blocks that not every token reaches: such a model needs one process"
BATCHES = {
    "shapes": "rank 0 (4, 4) and (4, 4), rank 1 (2, 4) and (2, 4): each is to give the global batch",
    "contents": "ranks have batches of one shape and other contents: each is to give the global batch, and takes its own "
    "rows of it. Let no sampler share out the data",
}
FAULTS = Path(__file__).with_name("rank_faults.py")


def started(*arguments: str) -> Run:
    """The program of faults, which takes a stand-in from the tests' folder."""
    path = os.pathsep.join([str(FAULTS.parents[1]), os.environ["PYTHONPATH"]])
    return Run(*arguments, main=FAULTS, env={"PYTHONPATH": path})


@pytest.fixture(scope="module")
def replies() -> Any:
    """What the supervisor said of each fault, all by one program."""
    run = started()
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
        ("cannot", "unsupported", "no such GPU"),
        ("other experts, since=0", "unsupported", f"the ranks' first pass brought them gradients of {OTHER}"),
        (
            "other experts, since=1",
            "unsupported",
            "rank 1: this pass brought gradients of other parameters than the first",
        ),
        ("gathers bf16", "failed_check", BF16),
        ("tokens float32", "failed_check", TOKENS),
        ("engine bf16", "failed_check", ENGINE),
        (
            "gathers rows",
            "unsupported",
            "parallel fsdp2: gather fp8: RowwiseScaling has more than one scale a weight; choose per-tensor",
        ),
        ("not a number, check=True", "failed_check", "loss: error nan > "),
        ("not a number, check=False", "diverged", "the loss is not finite"),
    ],
)
def test_a_fault_of_one_rank_is_one_typed_row(replies: Any, fault: str, outcome: str, reason: str) -> None:
    assert replies[fault]["outcome"] == outcome
    assert replies[fault]["reason"].startswith(reason)


@pytest.mark.parametrize(("mode", "what"), [("ddp", "contents"), ("tp", "shapes")])
def test_ranks_with_other_batches_are_told(replies: Any, mode: str, what: str) -> None:
    said = replies[f"other {what}, {mode=}"]
    assert said["outcome"] == "crashed"
    assert said["reason"].endswith(BATCHES[what])


def test_a_gather_in_fp8_is_what_the_record_says(replies: Any) -> None:
    said = replies["gathers fp8"]
    assert said["outcome"] == "ok", said["reason"]
    gathers = {each["dtype"]: each["bytes"] for each in said["work"]["collectives"] if "gather" in each["name"]}
    assert gathers.keys() == {"uint8", "float32"}  # of the blocks, and of the tables
    tokens = replies["tokens fp8"]
    assert tokens["outcome"] == "ok", tokens["reason"]
    assert tokens["work"]["sequence_parallel"]
    sent = {each["dtype"] for each in tokens["work"]["collectives"] if "gather" in each["name"]}
    assert sent == {"uint8", "bfloat16", "float32"}  # between the layers, of the head, of the embedding's gradient


@pytest.mark.parametrize("mode", ["fsdp2", "tp"])
def test_a_trial_of_transformer_engine_s_layers_is_checked_as_any_other(replies: Any, mode: str) -> None:
    """By a stand-in: loss and gradients against float64, what ran, and what was gathered, weights or tokens."""
    said = replies[f"engine {mode}"]
    assert said["outcome"] == "ok", said["reason"]
    assert len(said["check"]["quantities"]) > 10
    assert said["work"]["ran"]["gemm_fp8"] == 12
    gathers = {each["dtype"] for each in said["work"]["collectives"] if "gather" in each["name"]}
    assert gathers == {"bfloat16", "float32"} | ({"uint8"} if mode == "tp" else set())


def test_what_throttles_the_gpu_of_any_rank_is_recorded(replies: Any) -> None:
    state = {"uuid": "GPU-0", "throttle_reasons": 33, "lowest_sm_clock_hz": 1.2e9}
    assert replies["throttled"]["device_state"] == state


def test_a_hanging_rank_is_found_by_the_others_patience(replies: Any) -> None:
    assert replies["hangs"]["work_s"] < 4 + 3 + 8


def test_ranks_wait_for_a_reference_however_long_it_takes_one(replies: Any) -> None:
    assert replies["slow reference"]["outcome"] == "ok", replies["slow reference"]["reason"]
    assert replies["slow reference"]["work_s"] > 2 * 4


def scaled(folder: Path, chosen: str, number: int) -> tuple[str, list[dict[str, Any]]]:
    """A run of so many trials from the command line: what it printed, and its records."""
    done = te_bench("run", "scaling", "--device", "cpu", "--tokens", "16", "--only", chosen, "--out", folder, main=None)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(folder)
    assert [row["outcome"] for row in found] == ["ok"] * number, done
    return done.stdout, found


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run said, its steps by mode of parallelism, and torchtitan's, of one process and of two."""
    said, found = scaled(tmp_path_factory.mktemp("scaled"), "*dp*-x2/flash/bf16/*,*-torchtitan-fsdp2-*", 4)
    theirs = [row for row in found if "rival" in row["trial"]["problem"]]
    return said, {row["work"]["parallel"]: row for row in found if row not in theirs}, theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "seen"), [("ddp", {"allreduce"}), ("fsdp2", {"allgather", "reduce_scatter", "allreduce"})]
)
def test_a_run_divides_its_steps_and_says_so(in_bf16: Any, mode: str, seen: set[str]) -> None:
    """The record says over what and by which collectives, and the check held the global batch."""
    said, found, _ = in_bf16
    assert f"bf16, {mode} x2" in said
    step = found[mode]
    assert {"world": 2, "parallel": mode, "backend": "gloo", "tokens": 4 * 16}.items() <= step["work"].items()
    assert {each["name"].removesuffix("_base") for each in step["work"]["collectives"]} == seen
    gathers = [each["dtype"] for each in step["work"]["collectives"] if "gather" in each["name"]]
    assert gathers == (["bfloat16", "float32"] if mode == "fsdp2" else [])  # of the blocks, and of the tables
    assert {each["dtype"] for each in step["work"]["collectives"] if "reduce" in each["name"]} == {"float32"}
    assert step["check"]["quantities"]
    assert len(step["samples"]["latency_s"]) == 20


@pytest.mark.slow
def test_a_run_by_hsdp_says_its_groups(tmp_path: Path) -> None:
    """Of a step that gathers in FP8: which ranks share weights, by which collectives, held to what was asked for."""
    sizes = ("--device", "cpu", "--model", "tiny", "--batch", "4", "--tokens", "16", "--seeds", "1")
    divided = ("--gpus-per-trial", "4", "--parallel", "hsdp", "--shard", "2", "--gather", "fp8")
    only = ("--only", "*hsdp-x4-shard2-gather-fp8/*/delayed_scaling/*")
    done = te_bench("run", "fp8", *sizes, *divided, *only, "--out", tmp_path, main=None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hsdp x4 in groups of 2" in done.stdout
    (step,) = rows(tmp_path)
    assert step["outcome"] == "ok", step["reason"]
    assert {"world": 4, "parallel": "hsdp", "shard": 2}.items() <= step["work"].items()
    within = {(each["name"], each["dtype"]): each.get("ranks") for each in step["work"]["collectives"]}
    assert within["allgather_base", "uint8"] == [0, 1]
    assert within["reduce_scatter_base", "float32"] == [0, 1]
    assert [0, 2] in [each.get("ranks") for each in step["work"]["collectives"] if each["name"] == "allreduce"]


def test_scaling_counts_what_each_rank_holds(tmp_path: Path) -> None:
    """In FP8, on one process and on two: shares of what FSDP2 divides, and FP8 copies of whole weights in every rank."""
    _, (one, two) = scaled(tmp_path, "*V256/*/delayed_scaling/*,*-fsdp2-x2/*/delayed_scaling/*", 2)
    assert two["work"]["tokens"] == 2 * one["work"]["tokens"]
    [alone], ranks = ([rank["memory"] for rank in row["work"]["ranks"]] for row in (one, two))
    assert len(ranks) == 2
    for kind in ("weights", "gradients", "states"):
        assert max(rank[kind] for rank in ranks) < 0.52 * alone[kind]  # norms and biases are whole
        assert sum(rank[kind] for rank in ranks) >= alone[kind]
    linears = 2 * 12 * 64**2  # of two layers, a byte a weight
    assert [memory["fp8_copies"] for memory in (alone, *ranks)] == [linears] * 3
    assert one["work"].get("interconnect") is None
    link = two["work"]["interconnect"]
    assert link["backend"] == "gloo"
    assert link["busbw"] == pytest.approx(link["bytes"] / link["seconds"])  # 2 (n - 1) / n = 1
    assert "exposed_s" not in two["work"]["ranks"][0]  # a CPU has none
    assert "energy_j" not in two["samples"]
    assert "A training step on more GPUs" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.slow
def test_of_torchtitan_s_step_every_weight_is_a_share(in_bf16: Any) -> None:
    """On one process it is over a group of one rank, on two each has half."""
    theirs = in_bf16[2]
    assert [row["work"]["world"] for row in theirs] == [1, 2]
    held = [[rank["memory"]["weights"] for rank in row["work"]["ranks"]] for row in theirs]
    assert held[1] == [held[0][0] / 2] * 2
    gathered = {each["dtype"] for each in theirs[1]["work"]["collectives"] if "gather" in each["name"]}
    assert gathered == {"bfloat16"}


def test_a_token_that_rounding_sends_to_another_expert_in_one_rank_is_no_fault(replies: Any) -> None:
    assert replies["experts"]["outcome"] == "ok", replies["experts"]["reason"]


@pytest.fixture(scope="module")
def compiled() -> Any:
    """The work of steps that are compiled, each in few graphs and nothing twice; all by one program."""
    done = started("compiled").finish()
    assert done.returncode == 0, done.stderr
    replies = json.loads(done.stdout)
    for reply in replies.values():
        assert reply["outcome"] == "ok", reply["reason"]
        assert (reply["work"]["graph_breaks"], reply["work"]["recompiles"]) == (0, 0)
    return {name: reply["work"] for name, reply in replies.items()}


def times_sent(work: Any) -> dict[tuple[str, str], int]:
    return {(each["name"], each["dtype"]): each["times"] for each in work["collectives"]}


@pytest.mark.slow
def test_fsdp2_compiles_block_by_block_and_the_loss(compiled: Any) -> None:
    assert compiled["blocks"]["ran"]["compiled"] == 2 + 1
    assert compiled["blocks"]["ran"]["gemm_fp8"] == 2 * 4 * 3


@pytest.mark.slow
def test_shared_layers_vocabulary_and_tokens_compile_into_one_graph(compiled: Any) -> None:
    """A column Linear's input is gathered once, and kept for its weight's gradient."""
    assert compiled["tokens"]["ran"]["compiled"] == 1
    sent = times_sent(compiled["tokens"])
    assert sent["all_gather_into_tensor", "uint8"] == 4
    assert sent["reduce_scatter_tensor", "bfloat16"] == 4 + 1  # and of the head


@pytest.mark.slow
def test_torchtitan_compiles_shared_layers_block_by_block_and_the_loss(compiled: Any) -> None:
    assert compiled["theirs"]["ran"]["compiled"] == 2 + 1
    pairs = 4 + 1  # of two blocks, and of the head, in either pass
    assert times_sent(compiled["theirs"])["all_gather_into_tensor", "bfloat16"] == 2 * pairs
