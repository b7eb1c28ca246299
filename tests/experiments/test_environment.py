"""What is part of the environment's id and what is only recorded; nothing here needs a GPU or torch."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from te_bench.experiments import environment
from te_bench.experiments.spec import digest


def test_the_id_is_the_hash_of_the_identity_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    first = environment.capture("cpu")
    assert first["id"] == digest(first["identity"])
    monkeypatch.setattr(environment, "_git", lambda: {"git_commit": "other", "git_dirty": True})
    assert environment.capture("cpu")["id"] == first["id"]
    monkeypatch.setattr(environment, "code_hash", lambda: "other")
    assert environment.capture("cpu")["id"] != first["id"]
    json.dumps(first, allow_nan=False)


def test_it_reads_torch_s_version_without_importing_it() -> None:
    found = environment.capture("cpu")["identity"]
    assert found["torch"] == torch.__version__
    assert found["cuda"] is None  # a CPU trial does not depend on it
    assert environment._torch_build()["cuda"] == torch.version.cuda


def gpu(**changes: Any) -> dict[str, Any]:
    return {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580.1", "power_limit_w": 700.0, **changes}


def test_another_gpu_of_the_same_make_is_the_same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(device: str, **changes: Any) -> str:
        monkeypatch.setattr(environment, "nvidia_gpus", lambda: [gpu(**changes)])
        return str(environment.capture(device)["id"])

    assert identity("cuda") == identity("cuda", uuid="GPU-2", power_limit_w=600.0)
    assert identity("cuda") != identity("cuda", name="NVIDIA H100")
    assert identity("cuda") != identity("cuda", driver="590.1")
    assert identity("cuda") != identity("cpu")
    assert identity("cpu") == identity("cpu", name="NVIDIA H100")


def test_the_code_hash_sees_an_uncommitted_change_to_what_measures_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(environment.__file__).parents[1]
    copy = shutil.copytree(package, tmp_path / "te_bench", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(environment, "__file__", str(copy / "experiments" / "environment.py"))
    before = environment.code_hash()
    assert re.fullmatch("[0-9a-f]{16}", before)
    (copy / "reports" / "text.py").write_text("# changed\n")
    (copy / "cli.py").write_text("# changed\n")
    assert environment.code_hash() == before
    for folder in ("kernels/attention/flash.py", "models/gpt.py", "experiments/timing.py"):
        source = copy / folder
        source.write_text(source.read_text() + "# changed\n")
        assert environment.code_hash() != before
        before = environment.code_hash()
    (copy / "kernels" / "new.py").write_text("")
    assert environment.code_hash() != before


def test_without_a_driver_there_are_no_gpus_and_no_state() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver here")
    assert environment.nvidia_gpus() == []
    assert environment.gpu_state("GPU-0") == {}
