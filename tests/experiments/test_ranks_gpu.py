"""A step over two GPUs and NCCL: graphs, fused blocks and FP8 under ddp, eager steps under fsdp2, each checked."""

from pathlib import Path

import pytest
import torch
from driving import rows, te_bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
COMMAND = ("run", "speed", "--device", "cuda", "--gpus", "0,1", "--gpus-per-trial", "2", "--seeds", "1", "--batch", "8")


@pytest.mark.parametrize(
    ("mode", "only", "fewest"),
    [
        ("ddp", "*-adamw-triton*/cudnn/*", 4),
        ("ddp", "*V*-ddp-x2/cudnn/bf16/*", 1),
        ("fsdp2", "*/eager/*,*/compile/*", 4),
    ],
)
def test_a_step_over_two_gpus_is_checked_and_timed(tmp_path: Path, mode: str, only: str, fewest: int) -> None:
    suite = COMMAND if mode == "ddp" else ("run", "fp8", *COMMAND[2:])
    done = te_bench(*suite, "--parallel", mode, "--only", only, "--out", tmp_path, main=None, timeout=500)
    found = rows(tmp_path)
    assert [row["reason"] for row in found if row["outcome"] != "ok"] == [], done.stdout + done.stderr
    steps = [row for row in found if row["trial"]["workload"] == "train_step"]
    assert len(steps) >= fewest
    for step in steps:
        assert {"world": 2, "parallel": mode, "backend": "nccl"}.items() <= step["work"].items()
        assert step["check"]["quantities"]
