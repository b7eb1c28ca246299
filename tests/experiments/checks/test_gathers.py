"""A project whose way gathers blocks in FP8 is held to it, as te-bench's --gather fp8 is."""

from types import SimpleNamespace
from typing import Any

import pytest

from te_bench.experiments.checks import gathers
from te_bench.experiments.measurement import CheckFailed, Measurement, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.suite_trials import BENCH_PY

TRIAL = Trial(
    workload="scaling",
    device="cuda",
    attention="cudnn",
    problem={
        **BENCH_PY,
        "model": "tiny",
        "batch": 4,
        "block": 16,
        "vocab": 250,
        "padded_vocab": 256,
        "rival": "torchao_tensorwise",
        "parallel": "fsdp2",
        "world": 2,
    },
)
TABLES = {"name": "allgather_base", "dtype": "bfloat16", "times": 3, "bytes": 5}


def of(sent: list[dict[str, Any]] | None, world: int = 2, due: dict[str, Any] | None = None) -> None:
    due = {"uint8": (100, 100)} if due is None else due
    parallel = SimpleNamespace(world=world, replicas=world, gathered=lambda model, gather, tokens: due)
    step: Any = SimpleNamespace(parallel=parallel, model=None, optim=SimpleNamespace(accumulate=1))
    gathers.require(TRIAL, step, sent, Measurement(check={}, work={}, samples={"latency_s": [1.0]}))


def test_what_a_project_gathers_in_fp8_is_counted() -> None:
    for dtype in ("uint8", "float8_e4m3fn"):
        of([TABLES, {"name": "allgather_base", "dtype": dtype, "times": 4, "bytes": 100}])
    said = "rival torchao_tensorwise: a step is to gather 100 bytes of uint8; this one gathered 205 bytes of bfloat16"
    with pytest.raises(CheckFailed, match=said) as failed:
        of([TABLES | {"bytes": 205}])
    assert failed.value.measurement.samples == {}
    with pytest.raises(Unsupported, match="torch lets nobody look into a step with cudnn"):
        of(None)


def test_what_a_project_says_that_it_gathers_in_half_precision_is_held_to() -> None:
    sharded = {"bfloat16": (5, 5)}
    of([TABLES], due=sharded)
    with pytest.raises(
        CheckFailed, match="a step is to gather 5 bytes of bfloat16; this one gathered 10 bytes of float32"
    ):
        of([TABLES | {"dtype": "float32", "bytes": 10}], due=sharded)


def test_one_rank_gathers_nothing_and_other_ways_nothing_in_fp8() -> None:
    of(None, world=1)
    of([TABLES], due={})
