"""What is part of the environment's id and what is only recorded; nothing here needs a GPU or torch."""

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

from te_bench.cli.options import find_gpus
from te_bench.experiments import doctor, environment, host
from te_bench.experiments.spec import digest
from te_bench.kernels import measured
from te_bench.reports.analysis.rows import differences


def test_the_id_is_the_hash_of_the_identity_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    first = environment.capture("cpu")
    assert first["id"] == digest(first["identity"])
    monkeypatch.setattr(environment, "code_hash", lambda: "other")
    assert environment.capture("cpu")["id"] != first["id"]
    json.dumps(first, allow_nan=False)


def test_it_reads_torch_s_version_without_importing_it() -> None:
    found = environment.capture("cpu")["identity"]
    assert found["torch"] == torch.__version__
    assert found["cuda"] is None  # a CPU trial does not depend on it
    assert environment.capture("cuda", [gpu()])["identity"]["cuda"] == torch.version.cuda


def gpu(**changes: Any) -> dict[str, Any]:
    return {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580.1", "power_limit_w": 700.0, **changes}


def test_another_gpu_of_the_same_make_is_the_same_environment() -> None:
    def identity(device: str, **changes: Any) -> str:
        return str(environment.capture(device, [gpu(**changes)])["id"])

    assert identity("cuda") == identity("cuda", uuid="GPU-2")
    assert identity("cuda") != identity("cuda", power_limit_w=600.0)
    assert identity("cuda") != identity("cuda", max_sm_clock_hz=1.755e9)
    assert identity("cuda") != identity("cuda", name="NVIDIA H100")
    assert identity("cuda") != identity("cuda", driver="590.1")
    assert identity("cuda") != identity("cpu")
    assert identity("cpu") == identity("cpu", name="NVIDIA H100")


def test_losses_of_a_gpu_know_nothing_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(cores: int, driver: str = "580.1", **asked: Any) -> dict[str, Any]:
        monkeypatch.setattr(host, "cores", lambda: cores)
        return environment.capture(asked.pop("device", "cuda"), [gpu(driver=driver, **asked)], losses=True)

    one = capture(16)
    assert one["id"] == capture(32)["id"] == capture(16, "580.2")["id"] == digest(one["identity"])
    assert one["id"] == capture(16, power_limit_w=600.0, max_sm_clock_hz=1.755e9)["id"]
    assert (one["details"]["cores"], one["details"]["driver"]) == (16, "580.1")  # recorded
    assert one["id"] != capture(16, name="NVIDIA H100")["id"]
    assert capture(16, device="cpu")["id"] != capture(32, device="cpu")["id"]  # there the host computes
    monkeypatch.setattr(environment, "code_hash", lambda: "other")
    assert one["id"] != capture(16)["id"]
    here = {"cpu": measured.machine_name("cpu"), "cores": 16, "max_sm_clock_hz": None}
    assert environment.of_times(one) == here | {"driver": "580.1", "power_limit_w": 700.0}
    assert environment.of_times(capture(16, device="cpu")) == here | {"driver": None, "power_limit_w": None}


@pytest.mark.parametrize("losses", [False, True])
@pytest.mark.parametrize("package", ["transformer_engine", "torchao", "liger-kernel", "flash-attn-4"])
def test_another_version_of_a_package_with_kernels_is_another_environment(monkeypatch, package, losses):
    usual = importlib.metadata.version

    def capture(version: str) -> dict[str, Any]:
        monkeypatch.setattr(importlib.metadata, "version", lambda of: version if of == package else usual(of))
        assert environment.capture("cpu")["identity"]["kernels"] is None
        return environment.capture("cuda", [gpu()], losses=losses)

    old, new = capture("2.8"), capture("2.9")
    assert old["id"] != new["id"]
    assert new["details"]["packages"][package] == "2.9"
    [differs] = differences(old["identity"], new["identity"])
    assert f"{package} 2.8" in differs.partition(" -> ")[0]


@pytest.mark.parametrize(
    "variable",
    [
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NVTE_FLASH_ATTN", "NVIDIA_TF32_OVERRIDE"),
        *("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "TORCH_COMPILE_DISABLE", "NCCL_P2P_DISABLE"),
        *("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS"),
    ],
)
def test_a_variable_that_changes_kernels_or_memory_is_part_of_the_environment(monkeypatch, variable):
    for name in [
        name for name in os.environ if name.startswith(("NVTE_", "PYTORCH_", "NVIDIA_TF32_", "CU", "TORCH", "NCCL_"))
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")  # which changes no result
    usual = environment.capture("cuda", [gpu()])
    assert usual["identity"]["variables"] is None
    monkeypatch.setenv(variable, "0")
    found = environment.capture("cuda", [gpu()])
    assert (found["id"] != usual["id"], found["identity"]["variables"]) == (True, f"{variable}=0")


def test_gpus_of_different_power_limits_are_not_those_of_one() -> None:
    both = environment.capture("cuda", [gpu(), gpu(index=1, uuid="GPU-2", power_limit_w=600.0)])
    assert both["identity"]["power_limit_w"] == "600 and 700"


def test_the_environment_is_that_of_the_gpus_that_were_chosen_which_are_of_one_model() -> None:
    other = gpu(index=1, name="NVIDIA H100", uuid="GPU-2")
    found = environment.capture("cuda", [other])
    assert found["identity"]["gpu"] == "NVIDIA H100"
    assert [each["uuid"] for each in found["details"]["gpus"]] == ["GPU-2"]
    with pytest.raises(ValueError, match="GPUs of one model, these are NVIDIA H100, NVIDIA H200"):
        environment.capture("cuda", [gpu(), other])


@pytest.mark.parametrize(
    ("listed", "visible"),
    [
        *((None, [0, 1, 2]), ("2,0", [2, 0]), (" 1 , 2 ", [1, 2]), ("GPU-bb,0", [1, 0]), ("GPU-c", [2])),
        *((nothing, []) for nothing in ("", "-1", "GPU-", "MIG-1")),
        *(("0,-1,1", [0]), ("0,9,1", [0]), ("1,1", [1])),
    ],
)
def test_an_inherited_choice_of_gpus_is_read_as_cuda_reads_it(monkeypatch, listed, visible):
    all_three = [gpu(index=i, uuid=uuid) for i, uuid in enumerate(("GPU-aa", "GPU-bb", "GPU-cc"))]
    monkeypatch.setattr(environment, "nvidia_gpus", lambda: all_three)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert [each["index"] for each in environment.visible_gpus()] == visible


@pytest.mark.parametrize(
    ("gpus", "version", "cuda", "device"),
    [(1, "2.13.0", "13.0", "cuda"), (1, "2.13.0+cpu", None, "cpu"), (1, None, None, "cpu"), (0, "2.13", "13.0", "cpu")],
)
def test_the_default_is_the_gpu_where_torch_can_use_it(monkeypatch, gpus, version, cuda, device):
    monkeypatch.setattr(environment, "nvidia_gpus", lambda: [gpu()] * gpus)
    monkeypatch.setattr(environment, "_torch_build", lambda: {"version": version, "cuda": cuda})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment.default_device() == device


def test_a_slice_of_a_gpu_is_refused_and_not_taken_for_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "nvidia_gpus", lambda: [{**gpu(), "memory_bytes": 2**37}])
    monkeypatch.setattr(environment, "no_cuda", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    said = "CUDA_VISIBLE_DEVICES=MIG-1: MIG slices are not supported; name whole GPUs, or give --device cpu"
    with pytest.raises(ValueError, match=said):
        environment.default_device()
    with pytest.raises(ValueError, match=said):
        find_gpus("cuda", None)
    assert doctor.examine()["machine"]["gpu use"] == said


@pytest.mark.parametrize("setting", ["1", " 3 ", "0", "-2", "4,2", "many", "", None])
def test_the_threads_of_a_cpu_are_part_of_its_environment(monkeypatch: pytest.MonkeyPatch, setting: str | None) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    default = environment.capture("cpu")
    assert default["identity"]["threads"] == default["identity"]["cores"]
    if setting is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    found = environment.capture("cpu")
    assert found["identity"]["threads"] == {"1": 1, " 3 ": 3}.get(setting or "", found["identity"]["cores"])
    monkeypatch.setenv("MKL_NUM_THREADS", "5")  # which torch prefers
    assert environment.capture("cpu")["identity"]["threads"] == 5
    assert environment.capture("cuda", [gpu()])["identity"]["threads"] is None


def test_what_a_driver_does_not_say_is_none_and_a_mistake_of_ours_is_not_hidden(monkeypatch):
    def fail(error: Exception, *names: str) -> None:
        def call(*arguments: object) -> None:
            raise error

        for name in names:
            monkeypatch.setattr(pynvml, name, call)

    readings = ("ClockInfo", "Temperature", "PowerUsage", "CurrentClocksEventReasons")
    each = [f"nvmlDeviceGet{reading}" for reading in readings]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    fail(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED), *each)
    said = environment.gpu_state("GPU-0")
    assert said.pop("uuid") == "GPU-0"
    assert set(said.values()) == {None}
    fail(TypeError("a mistake of ours"), *each)
    with pytest.raises(TypeError):
        environment.gpu_state("GPU-0")
    fail(pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), "nvmlInit")
    assert (environment.nvidia_gpus(), environment.gpu_state("GPU-0")) == ([], {})
    fail(TypeError("a mistake of ours"), "nvmlInit")
    for call in (environment.nvidia_gpus, lambda: environment.gpu_state("GPU-0")):
        with pytest.raises(TypeError):
            call()


def test_the_code_hash_sees_an_uncommitted_change_to_what_measures_only(tmp_path, monkeypatch):
    package = Path(environment.__file__).parents[1]
    copy = shutil.copytree(package, tmp_path / "te_bench", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(environment, "__file__", str(copy / "experiments" / "environment.py"))
    before = environment.code_hash()
    assert re.fullmatch("[0-9a-f]{16}", before)
    for other in ("reports/page/text.py", "cli/run.py", "gate/paired_trial.py"):
        (copy / other).write_text("# changed\n")
    (copy / "kernels" / ".#new.py").symlink_to("me@host.1234:5678")  # Emacs locks a file that it edits so
    assert environment.code_hash() == before
    measuring = "kernels/attention/backends/flash.py", "models/zoo/gpt.py", "training/step.py", "experiments/timing.py"
    for source in map(copy.joinpath, measuring):
        source.write_text(source.read_text() + "# changed\n")
        assert environment.code_hash() != before
        before = environment.code_hash()
    (copy / "kernels" / "new.py").write_text("")
    assert environment.code_hash() != before


def test_the_commit_s_time_is_recorded_in_utc_and_is_no_part_of_the_id(tmp_path, monkeypatch):
    def git(*arguments: str, **when: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", "-C", tmp_path, *who, *arguments]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | when)

    source = tmp_path / "te_bench" / "experiments" / "environment.py"
    source.parent.mkdir(parents=True)
    source.touch()
    monkeypatch.setattr(environment, "__file__", str(source))
    known = environment.capture("cpu")["details"]
    assert (known["git_commit"], known["git_commit_time"], known["git_dirty"]) == (None, None, None)
    git("init")
    assert environment.capture("cpu")["details"]["git_commit_time"] is None  # no commit yet
    git("add", ".")
    author, committer = "2026-01-01T00:00:00+02:00", "2026-02-01T01:30:00+02:00"
    git("commit", "-m", "one", GIT_AUTHOR_DATE=author, GIT_COMMITTER_DATE=committer)
    body = environment.capture("cpu")
    found = body["details"]
    assert found["git_commit_time"] == "2026-01-31T23:30:00+00:00"
    assert (len(found["git_commit"]), found["git_dirty"]) == (40, False)
    assert not any(key.startswith("git") for key in body["identity"])


def test_without_a_driver_there_are_no_gpus_and_no_state() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver here")
    assert environment.nvidia_gpus() == []
    assert environment.gpu_state("GPU-0") == {}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's measured times would be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "te-bench" / "measured.json"
    path.parent.mkdir()
    return path


def test_the_users_rows_of_an_operator_count_where_trials_choose_by_them(table: Path) -> None:
    def identity(*by_table: str, device: str = "cpu") -> object:
        return environment.capture(device, [gpu()] if device == "cuda" else [], by_table=by_table)["id"]

    cpu, cuda = identity(), identity(device="cuda")
    shipped = {name: measured.read(measured.SHIPPED, name)[0] for name in ("attention", "gemm")}
    table.write_text(measured.text(dataclasses.replace(row, machine="another") for row in shipped.values()))
    assert identity("attention", "gemm") == cpu
    here = measured.machine_name("cpu")
    table.write_text(measured.text(dataclasses.replace(row, machine=here) for row in shipped.values()))
    assert identity() == identity("gemm") == cpu  # whose GEMMs are chosen on a GPU alone
    assert identity("attention") != cpu
    table.write_text(measured.text([dataclasses.replace(shipped["gemm"], machine=gpu()["name"])]))
    assert identity(device="cuda") == identity("attention", device="cuda") == cuda
    assert environment.capture("cuda", [gpu()])["id"] == identity("gemm", device="cuda") != cuda
    table.unlink()
    table.mkdir()  # no file: no other command should mind
    assert identity("attention") == cpu


def test_of_the_users_rows_neither_order_nor_source_counts_and_all_else_does(table: Path) -> None:
    def known(*rows: measured.Timing) -> object:
        table.write_text(measured.text(rows))
        return environment.capture("cuda", [gpu()])["id"]

    shipped = measured.read(measured.SHIPPED, "gemm")
    one, other = (dataclasses.replace(row, machine=gpu()["name"]) for row in shipped[:2])
    first = known(one, other)
    assert known(dataclasses.replace(other, source="measured again, to the same digits"), one) == first
    faster = dataclasses.replace(one, seconds={name: value / 2 for name, value in one.seconds.items()})
    assert len({first, known(one), known(faster, other), known()}) == 4
