"""What te-bench tune measures: shapes as the user writes them, and who is asked in which order."""

from typing import Any

import pytest

from te_bench.experiments import tuning
from te_bench.kernels import attention

FULL = {"batch": 1, "heads": 2, "length": 64, "head_dim": 16, "causal": False}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("12,12,1024,64,causal", {"batch": 12, "heads": 12, "length": 1024, "head_dim": 64, "causal": True}),
        ("1,32/8,64,16,full", {**FULL, "heads": 32, "kv_heads": 8}),
        ("1,2,64,16,window=255:0", {**FULL, "window_left": 255, "window_right": 0}),
        ("1,2,64,16,window=:7", {**FULL, "window_left": -1, "window_right": 7}),
    ],
)
def test_a_shape_of_attention(text: str, settings: dict[str, Any]) -> None:
    assert tuning.attention_shape(text) == settings


SIZES = {"m": 8, "n": 16, "k": 32}


@pytest.mark.parametrize(
    ("kind", "text", "settings"),
    [
        ("gemm", "8,16,32", {**SIZES, "dtype": "bf16"}),
        ("gemm", "8,16,32,fp8", {**SIZES, "dtype": "e4m3", "scales": "tensor", "fast_accum": True}),
        ("gemm", "8,16,32,fp8,row", {**SIZES, "dtype": "e4m3", "scales": "row", "fast_accum": True}),
        ("gemm", "8,16,32,fp8,promoted", {**SIZES, "dtype": "e4m3", "scales": "tensor", "fast_accum": False}),
        ("gemm", " 8,16,32,fp8,row,promoted", {**SIZES, "dtype": "e4m3", "scales": "row", "fast_accum": False}),
        ("gemm", "8,16,32,fp8,block", {**SIZES, "dtype": "e4m3", "scales": "block", "fast_accum": False}),
        ("epilogue", "8,16,32,gradient", {**SIZES, "dtype": "bf16", "epilogue": "gradient"}),
        ("head", "8,16,50/64", {"n": 8, "d": 16, "vocab": 50, "padded": 64}),
        ("head", "8,16,50", {"n": 8, "d": 16, "vocab": 50, "padded": 50}),
    ],
)
def test_a_shape_of_a_gemm_or_a_head(kind: str, text: str, settings: dict[str, Any]) -> None:
    assert tuning.KINDS[kind].parse(text) == settings


def test_the_rivals_take_turns_and_auto_is_none_of_them_nor_what_it_never_takes() -> None:
    names = [name for name in attention.names() if name != "auto" and not attention.load(name).fp8]
    experiment = tuning.experiment("attention", "cuda", ["1,2,64,16,causal", "1,2,64,16,full"], None, None, 2)
    ran = [(t.problem["causal"], t.attention) for t in experiment.trials]
    once = [(causal, name) for causal in (True, False) for name in names]
    assert ran == [*once, *reversed(once)]
    assert {t.precision for t in experiment.trials} == {"bf16"}
    shapes_of_the_suite = tuning.experiment("attention", "cuda", [], None, "flash,cudnn", 1)
    assert len(shapes_of_the_suite.trials) == 2 * 11


def test_a_gpus_gemms_are_the_shipped_shapes_and_each_asks_its_own_rivals() -> None:
    trials = tuning.experiment("gemm", "cuda", [], None, None, 1).trials
    asked: dict[str, set[object]] = {}
    for t in trials:
        asked.setdefault(str(t.problem["dtype"]), set()).add(t.problem["backend"])
    assert asked == {"bf16": {"torch", "gluon"}, "e4m3": {"gluon", "reference", "scaled_mm", "triton"}}
    epilogues = tuning.experiment("epilogue", "cuda", [], None, None, 2).trials
    assert {t.problem["epilogue"] for t in epilogues} == {"activated", "gradient"}
    assert {t.problem["backend"] for t in epilogues} == {"separate", "gluon"}
    assert len({t.id for t in (*trials, *epilogues)}) == len(trials) + len(epilogues)
