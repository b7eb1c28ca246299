"""GEMMs that overlap with their collectives, by stand-ins of symmetric memory's operators over gloo: overlap_cases."""

import json
from pathlib import Path
from typing import Any

import pytest
from driving import Run

CASES = Path(__file__).with_name("overlap_cases.py")
FUSED = {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"}
FUSED_FP8 = {"fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"}
LEAVE = "leave it out"

pytestmark = pytest.mark.slow  # its one program takes twenty seconds


@pytest.fixture(scope="module")
def replies() -> Any:
    """Of two ranks' cases and of trials, all by one program."""
    run = Run(main=CASES)
    done = run.finish()
    assert done.returncode == 0, done.stderr
    assert run.family() == []
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(replies: Any) -> Any:
    assert replies["cases"]["outcome"] == "ok", replies["cases"]["reason"]
    return replies["cases"]["found"]


@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_linear_computes_what_it_does_with_gemm_and_collective_apart(found: Any, mode: str) -> None:
    """Output and gradients in float64, bf16 and FP8, with and without a bias, in the same dtypes."""
    said = {name: each for name, each in found["linears"].items() if name.startswith(mode)}
    assert len(said) == 8
    for name, each in said.items():
        kind = name.split()[1]
        assert each["differ"] <= {"None": 1e-14, "bf16": 2**-8}.get(kind, 1e-6), name
        dtypes = {e["name"]: e["dtype"] for e in each["sent"] if e["name"].startswith("fused")}
        if kind in ("delayed", "current"):
            fp8 = {"column": "float8_e4m3fn", "row": "float8_e5m2"}[mode]
            assert dtypes == dict(zip(sorted(FUSED_FP8), (fp8, "float32"), strict=True))
        else:
            assert dtypes == dict.fromkeys(FUSED, {"None": "float64"}.get(kind, "bfloat16"))


def test_what_operators_of_symmetric_memory_send_is_what_collectives_sent_before_them(found: Any) -> None:
    """As many bytes of each dtype; FP8 is sent as such, where NCCL and gloo send bytes."""
    for name, each in found["linears"].items():
        for kind in ("gather", "scatter"):
            by_dtype = [
                {
                    dtype: sum(e["bytes"] for e in sent if kind in e["name"] and e["dtype"].startswith((dtype, fp8)))
                    for dtype, fp8 in (("float64",) * 2, ("float32",) * 2, ("bfloat16",) * 2, ("uint8", "float8"))
                }
                for sent in (each["apart"], each["sent"])
            ]
            assert by_dtype[0] == by_dtype[1], name
            assert sum(by_dtype[0].values()) > 0


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_step_has_one_process_s_gradients_and_overlaps_all_pairs(found: Any, model: str) -> None:
    said = found["steps"][model]
    assert said["error"] <= 1e-12
    sent = {each["name"]: (each["times"], each["bytes"]) for each in said["sent"]}
    tokens, pairs = 8 * 16, 2 * 2
    assert said["due"] == 2 * pairs * tokens * 32
    for name in FUSED:  # of each pair two GEMMs in the forward pass and two in the backward pass
        assert sent[name] == (2 * pairs, 8 * said["due"])
    assert sent["allgather_base"][0] == sent["reduce_scatter_base"][0] == 2  # embedding and head


def test_fp8_trains_as_without_the_overlap(found: Any) -> None:
    for ours, theirs in found["fp8"].values():
        assert ours == theirs


def test_a_compiled_step_is_one_graph_that_overlaps(found: Any) -> None:
    said = found["compiled"]
    assert said["error"] <= 1e-5
    times = {each["name"]: each["times"] for each in said["sent"] if each["name"] in FUSED}
    assert times == dict.fromkeys(FUSED, 8)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("gloo", "parallel tp: overlap symmetric: symmetric memory needs NVIDIA GPUs of one host"),
        ("alone", "overlap symmetric is of what sequence_parallel gathers and scatters: give both"),
        ("unknown", "unknown overlap 'symetric'. Did you mean symmetric?"),
        (
            "cudagraph",
            "the replay of a captured graph shows nobody its operators; choose mode eager or compile, not cuda",
        ),
        ("compile-reduce-overhead", "choose mode eager or compile, not compile-reduce-overhead"),
        ("rows", f"RowwiseScaling has more than one scale a tensor, or casts in a way of its own; {LEAVE}"),
        ("bf16 wgrad", f"Float8CurrentScaling(bf16_wgrad=True) reads all ranks' rows uncast for wgrad; {LEAVE}"),
        ("emulated", f"Float8CurrentScaling(emulate=True) multiplies by no GEMM of cuBLASLt's; {LEAVE}"),
        ("odd", f"a rank's share of a weight is 72 x 32, and in FP8 both must be multiples of 16; {LEAVE}"),
        ("unshared", f"torch lets these GPUs share no memory (said by a test); {LEAVE}"),
    ],
)
def test_what_cannot_overlap_is_said_in_a_sentence(found: Any, what: str, sentence: str) -> None:
    assert sentence in found["refused"][what]


def test_a_record_proves_the_overlap(replies: Any) -> None:
    reply = replies["fp8"]
    assert reply["outcome"] == "ok", reply["reason"]
    work = reply["work"]
    assert {"parallel": "tp", "sequence_parallel": True, "overlap": "symmetric"}.items() <= work.items()
    fused = [each for each in work["collectives"] if each["name"].startswith("fused")]
    assert {each["name"] for each in fused} == FUSED_FP8
    assert all(each["bytes"] > 0 for each in fused)


def test_a_step_that_asked_for_the_overlap_and_ran_none_fails_its_check(replies: Any) -> None:
    assert replies["without"]["outcome"] == "failed_check"
    said = "overlap symmetric: operators of symmetric memory are to gather 32,768 numbers; this one did 0 so"
    assert replies["without"]["reason"].startswith(said)
    assert replies["without"]["samples"] == {}


def test_on_a_cpu_it_is_unsupported(replies: Any) -> None:
    said = "parallel tp: overlap symmetric: symmetric memory needs NVIDIA GPUs of one host"
    assert (replies["on a CPU"]["outcome"], replies["on a CPU"]["reason"]) == ("unsupported", said)
