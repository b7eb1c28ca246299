"""doctor's table: operators and backends on a GPU, which need not be there."""

import json
import lzma
from pathlib import Path

import pytest
import torch

from te_bench.experiments import doctor, environment, gpu_support
from te_bench.kernels import architecture, measured
from te_bench.kernels.architecture import GPUS

RESULTS = Path(__file__).parents[2] / "results"


pytestmark = pytest.mark.usefixtures("as_on_a_gpu")


def asked(name: str) -> dict[tuple[str, str], str]:
    gpu = architecture.find_gpu(name)
    return {(operator, backend): answer for operator, backend, answer in gpu_support.rows(gpu.machine, gpu.capability)}


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_runs_attention_norms_and_the_optimizer_in_triton(name: str) -> None:
    found = asked(name)
    for operator in ("attention, bf16, heads of 64", "attention, bf16, heads of 128", "norm: rmsnorm, bf16", "AdamW"):
        assert not found[operator, "triton"].startswith("no: ")
    known = (gpu_support.MEASURED, gpu_support.TESTED, gpu_support.COMPILES, gpu_support.UNTRIED)
    assert all(answer in known or answer.startswith(("no: ", "missing: ", "emulated: ")) for answer in found.values())


@pytest.mark.parametrize(
    ("name", "operator", "backend", "answer"),
    [
        ("A100", "quantize to FP8", "triton", "no: FP8 needs compute capability 8.9, this GPU has 8.0"),
        ("A100", "gemm, FP8 by tensor", "triton", "no: FP8 needs"),
        ("A100", "attention, bf16, heads of 64", "gluon", "no: compute capability 8.0 is not 9.0"),
        ("L40S", "gemm, FP8 by tensor", "triton", "no: TMA needs compute capability 9.0, this GPU has 8.9"),
        ("L40S", "gemm, FP8 by tensor", "scaled_mm", "should run"),
        ("L40S", "attention, bf16, heads of 64", "triton_fp8", "compiles, never run"),
        ("RTX 4090", "quantize to FP8", "triton", "compiles, never run"),
        ("RTX 4090", "FP8 recipe", "delayed_scaling", "should run"),
        ("A100", "FP8 recipe", "delayed_scaling", "emulated: FP8 needs compute capability 8.9, this GPU has 8.0; "),
        ("H100", "attention, bf16, heads of 64", "gluon", "measured"),
        ("H100", "gemm, FP8 by tensor", "gluon", "compiles, never run"),
        ("H100 PCIe", "attention, bf16, heads of 64", "gluon", "compiles, never run"),
        ("H200", "attention, bf16, heads of 64", "gluon", "measured"),
        ("H200", "gemm, FP8 by tensor", "gluon", "measured"),
        ("H200", "gemm, FP8 by block", "triton", "runs"),
        ("H200", "FP8 recipe", "rowwise_scaling", "measured"),
        ("B200", "gemm, FP8 by tensor", "gluon", "no: compute capability 10.0 is not 9.0"),
        ("B200", "gemm, FP8 by block", "triton", "compiles, never run"),
        ("B200", "FP8 recipe", "float8_block_scaling", "should run"),
        ("L40S", "FP8 recipe", "float8_block_scaling", "emulated: block scales: cuBLASLt has them on"),
        ("H200", "gemm, NVFP4", "block_scaled", "no: a tensor core with block scales needs compute capability 10.0"),
        ("H200", "FP8 recipe", "mxfp8_block_scaling", "emulated: the same numbers, by bf16 GEMMs"),
        ("B200", "gemm, NVFP4", "block_scaled", "compiles, never run"),
        ("B200", "FP8 recipe", "nvfp4_block_scaling", "compiles, never run"),
        ("RTX 5090", "FP8 recipe", "mxfp8_block_scaling", "compiles, never run"),
        ("RTX 5090", "attention, bf16, heads of 128", "triton_fp8", "compiles, never run"),
    ],
)
def test_each_is_told_what_it_runs_and_why_not_the_rest(name: str, operator: str, backend: str, answer: str) -> None:
    assert asked(name)[operator, backend].startswith(answer)


def test_what_the_tests_do_not_compile_should_run() -> None:
    found = {(operator, name): answer for operator, name, answer in gpu_support.rows("NVIDIA GB10", (12, 1))}
    assert found["gemm, MXFP8", "block_scaled"] == found["FP8 recipe", "nvfp4_block_scaling"] == "should run"
    assert found["AdamW", "triton"] == found["attention, bf16, heads of 64", "flash"] == "should run"


def test_what_a_user_measured_on_another_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in measured.timings("attention") if row.problem.head_dim == 64 and "triton" in row.seconds)
    own = measured.Timing(**{name: getattr(row, name) for name in row.__slots__} | {"machine": "NVIDIA L4"})
    timings = {"attention": (own,)}
    monkeypatch.setattr(measured, "timings", lambda operator: timings.get(operator, ()))
    found = asked("L4")
    assert found["attention, bf16, heads of 64", "triton"] == "measured"
    assert found["attention, bf16, heads of 64", "flash"] == "should run"
    assert found["attention, bf16, heads of 128", "triton"] == "compiles, never run"


@pytest.mark.parametrize(("machine", "folder"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100")])
def test_what_is_called_published_is_in_the_records(machine: str, folder: str) -> None:
    """Of attention, recipes and heads, which a trial names."""
    seen = set()
    for path in RESULTS.glob(f"{folder}/*/journal.jsonl*"):
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as journal:
            for line in journal:
                body = json.loads(line)["body"]
                for trial in body.get("trials", ()):
                    head = trial["problem"].get("head", "reference")
                    seen |= {("attention", trial["attention"]), ("linear cross-entropy", head)}
                    seen |= {("FP8 recipe", trial.get("recipe"))}
    claimed = gpu_support.PUBLISHED[machine]
    for operator in ("attention", "FP8 recipe", "linear cross-entropy"):
        assert {(operator, name) for name in claimed[operator]} <= seen


def test_a_gpu_that_is_there_gets_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    l40s = GPUS["L40S"]
    monkeypatch.setattr(environment, "default_device", lambda: "cuda")
    monkeypatch.setattr(environment, "visible_gpus", list)
    monkeypatch.setattr(environment, "capture", lambda *_: {"identity": {}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: l40s.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: l40s.machine)
    here, by_name = doctor.examine(), doctor.examine_gpu("L40S")
    assert by_name.keys() - here.keys() == {"GPU"}
    shared = {section: rows for section, rows in by_name.items() if section != "GPU"}
    assert {section: here[section] for section in by_name.keys() & here.keys()} == shared


@pytest.mark.parametrize("said", ["RTX 4090", "4090", "rtx4090", "NVIDIA GeForce RTX 4090", "geforce-rtx-4090"])
def test_a_gpu_is_found_as_people_say_it(said: str) -> None:
    assert architecture.find_gpu(said) is GPUS["RTX 4090"]
    assert doctor.examine_gpu(said)["GPU"]["compute capability"] == "8.9"


def test_an_unknown_gpu_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"unknown GPU 'V100'.*A100.*RTX 5090"):
        doctor.examine_gpu("V100")


def test_an_unknown_capability_is_taken_for_the_nearest_older_one() -> None:
    assert architecture.architecture((11, 0)) is architecture.ARCHITECTURES[10, 3]
    assert architecture.architecture((13, 0)).shared_memory == 99 * 1024
    assert {gpu.capability for gpu in GPUS.values()} <= architecture.ARCHITECTURES.keys()
