"""A step over two GPUs and NCCL: graphs, fused blocks and FP8 under ddp and zero1, steps of fsdp2 and tp, each checked.

CUDA_VISIBLE_DEVICES says which two; over four are the modes that have groups. One test at a time (-n 0), for where two share
a GPU, the one's kernels wait for the other's collectives. 15 minutes over two GPUs.
"""

import os
from pathlib import Path

import pytest
import torch
from driving import rows, te_bench

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, TWO]
VISIBLE = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1,2,3").split(",")
PAIR, ALL_FOUR = ({"CUDA_VISIBLE_DEVICES": ",".join(VISIBLE[:many])} for many in (2, 4))
#: te-bench's fused steps: in bf16, and in FP8 with an FP8 head.
FUSED = (
    "*-chunked-adamw-triton-blocks-fused-*/cudnn/bf16/*,*-fp8-adamw-triton-blocks-fused-*/cudnn/fp8/delayed_scaling/*"
)
COMMAND = ("run", "speed", "--device", "cuda", "--gpus-per-trial", "2", "--seeds", "1", "--batch", "8")


def test_scaling_reads_traces_energy_and_memory_of_every_rank(tmp_path: Path) -> None:
    """One GPU in bf16, two in FP8 by ddp in a captured graph and by fsdp2; four are not run where there are two."""
    in_fp8 = "*-ddp-x2/*/delayed_scaling/cudagraph/*,*-fsdp2-x2/*/delayed_scaling/*"
    only = f"*V50304/*/bf16/compile/*,{in_fp8},*-ddp-x4/*/bf16/compile/*"
    command = ("run", "scaling", "--device", "cuda", "--seeds", "1", "--batch", "4", "--only", only)
    done = te_bench(*command, "--out", tmp_path, main=None, timeout=590, env=PAIR)
    found = rows(tmp_path)
    four = [row for row in found if row["trial"]["problem"].get("world") == 4]
    assert [row["reason"] for row in four] == ["not run: 4 ranks need a GPU each, and this trial has 2"]
    others = [row for row in found if row not in four]
    assert [row["reason"] for row in others if row["outcome"] != "ok"] == [], done.stdout + done.stderr
    for row in others:
        world = row["trial"]["problem"].get("world", 1)
        assert len(row["work"]["ranks"]) == world
        assert row["samples"]["energy_j"][0] > 0
        for rank in row["work"]["ranks"]:
            assert rank["memory"]["peak"] > rank["memory"]["weights"] + rank["memory"]["states"]
            if world > 1:
                assert 0 <= rank["exposed_s"] <= rank["collectives_s"]
                assert rank["collectives_s"] > 0
        if world > 1:
            assert row["work"]["interconnect"]["busbw"] > 1e9


@pytest.mark.parametrize("project", ["torchtitan", "torchao", "transformer_engine_delayed"])
def test_another_project_s_steps_over_two_gpus_are_checked_and_timed(tmp_path: Path, project: str) -> None:
    """torchtitan's in bf16, torchao's and Transformer Engine's in FP8, where their packages are installed."""
    sizes = ("--model", "llama3-1b", "--batch", "1", "--tokens", "1024", "--seeds", "1")
    command = ("run", "scaling", "--device", "cuda", *sizes, "--only", f"*-{project}*-x2/*")
    done = te_bench(*command, "--out", tmp_path, main=None, timeout=590, env=PAIR)
    found = rows(tmp_path)
    if any("pip install" in (row["reason"] or "") for row in found):
        pytest.skip(found[0]["reason"])
    assert [row["reason"] for row in found if row["outcome"] != "ok"] == [], done.stdout + done.stderr
    assert {"fsdp2", "tp"} <= {row["work"]["parallel"] for row in found}
    for row in found:
        assert {"world": 2, "backend": "nccl"}.items() <= row["work"].items()
        assert row["check"]["quantities"]


@pytest.mark.parametrize(
    ("mode", "only", "fewest"),
    [
        ("ddp", f"{FUSED},*-chunked-adamw-triton-ddp-x2/cudnn/*", 5),
        ("ddp", "*V50304-ddp-x2/cudnn/bf16/*", 2),
        ("zero1", "*V50304-zero1-x2/cudnn/bf16/compile-reduce-overhead/*", 1),
        ("zero1", FUSED, 2),
        ("tp", "*/bf16/*,*/delayed_scaling/compile/*,*/rowwise_scaling/eager/*,*/float8_block_scaling/eager/*", 6),
        (
            "tp --sequence-parallel",
            "*/bf16/cudagraph/*,*/delayed_scaling/compile/*,*/float8_current_scaling/eager/*",
            3,
        ),
        ("fsdp2", "*/bf16/eager/*,*/bf16/compile/*,*/delayed_scaling/compile/*,*/float8_block_scaling/eager/*", 4),
        ("fsdp2", "*/bf16/cudagraph/*,*/delayed_scaling/cudagraph/*", 2),
    ],
)
def test_a_step_over_two_gpus_is_checked_and_timed(tmp_path: Path, mode: str, only: str, fewest: int) -> None:
    mode, *flags = mode.split()
    suite = COMMAND if mode not in ("fsdp2", "tp") else ("run", "fp8", *COMMAND[2:])
    done = te_bench(
        *suite, "--parallel", mode, *flags, "--only", only, "--out", tmp_path, main=None, timeout=500, env=PAIR
    )
    found = rows(tmp_path)
    assert [row["reason"] for row in found if row["outcome"] != "ok"] == [], done.stdout + done.stderr
    steps = [row for row in found if row["trial"]["workload"] == "train_step"]
    assert len(steps) >= fewest
    for step in steps:
        assert {"world": 2, "parallel": mode, "backend": "nccl"}.items() <= step["work"].items()
        assert step["check"]["quantities"]


def test_tensor_parallelism_overlaps_gemms_and_collectives_by_symmetric_memory(tmp_path: Path) -> None:
    """In bf16 and FP8, eager and compiled, each checked against float64; the record has the operators and what they sent."""
    flags = ("--parallel", "tp", "--sequence-parallel", "--overlap", "symmetric")
    only = "*/bf16/*,*/delayed_scaling/*,*/float8_current_scaling/eager/*,*/rowwise_scaling/eager/*"
    command = ("run", "fp8", *COMMAND[2:], *flags, "--only", only)
    done = te_bench(*command, "--out", tmp_path, main=None, timeout=590)
    steps = [row for row in rows(tmp_path) if row["trial"]["workload"] == "train_step"]
    refused = [
        row for row in steps if row["trial"]["mode"] == "cudagraph" or row["trial"]["recipe"] == "rowwise_scaling"
    ]
    assert [row["outcome"] for row in refused] == ["unsupported"] * 3
    ran = [row for row in steps if row not in refused]
    assert [row["reason"] for row in ran if row["outcome"] != "ok"] == [], done.stdout + done.stderr
    assert len(ran) == 5
    for row in ran:
        assert {"world": 2, "parallel": "tp", "overlap": "symmetric", "backend": "nccl"}.items() <= row["work"].items()
        assert row["check"]["quantities"]
        fused = {each["name"]: each["dtype"] for each in row["work"]["collectives"] if each["name"].startswith("fused")}
        scaled = "scaled_" if row["trial"]["precision"] == "fp8" else ""
        assert fused.keys() == {f"fused_all_gather_{scaled}matmul", f"fused_{scaled}matmul_reduce_scatter"}
        assert fused[f"fused_all_gather_{scaled}matmul"].startswith("float8" if scaled else "bfloat16")


def test_fsdp2_gathers_weights_in_fp8(tmp_path: Path) -> None:
    """Each checked against float64, and what was gathered against what was asked for."""
    only = ("--gather", "fp8", "--only", "*/delayed_scaling/eager/*,*/float8_current_scaling/eager/*")
    te_bench(
        "run", "fp8", *COMMAND[2:], "--parallel", "fsdp2", *only, "--out", tmp_path, main=None, timeout=500, env=PAIR
    )
    found = rows(tmp_path)
    assert [row["outcome"] for row in found] == ["ok", "ok"], [row["reason"] for row in found]
    for row in found:
        gathers = {each["dtype"] for each in row["work"]["collectives"] if "gather" in each["name"]}
        assert gathers == {"uint8", "float32"}


@FOUR
@pytest.mark.parametrize(
    "mode",
    ["hsdp", "hsdp --gather fp8", "fsdp2+tp", "fsdp2+tp --sequence-parallel"],
    ids=lambda mode: mode.replace(" ", ""),
)
def test_a_step_over_four_gpus_in_groups_of_two_is_checked_and_timed(tmp_path: Path, mode: str) -> None:
    mode, *flags = mode.split()
    only = "*/delayed_scaling/eager/*"
    if "--gather" not in flags:
        only += ",*/bf16/eager/*,*/bf16/compile/*,*/delayed_scaling/compile/*"
        only += ",*/bf16/cudagraph/*,*/delayed_scaling/cudagraph/*"
    over = ("--gpus-per-trial", "4", "--parallel", mode, "--shard", "2", *flags)
    command = ("run", "fp8", "--device", "cuda", "--seeds", "1", "--batch", "8", *over, "--only", only)
    done = te_bench(*command, "--out", tmp_path, main=None, timeout=500, env=ALL_FOUR)
    found = rows(tmp_path)
    assert [row["reason"] for row in found if row["outcome"] != "ok"] == [], done.stdout + done.stderr
    assert found
    for row in found:
        assert {"world": 4, "parallel": mode, "shard": 2, "backend": "nccl"}.items() <= row["work"].items()
        assert [0, 1] in [each.get("ranks") for each in row["work"]["collectives"]]
        assert row["check"]["quantities"]
