"""The suites under benchmarks/: they run, they hold every rival of the registries, and a GPU's rounds are its events'."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from te_bench import plugins
from te_bench.reports.exchange import pytest_import

ROOT = Path(__file__).resolve().parents[1]
#: As a user's shell: no xdist, under which pytest-benchmark times nothing, and no interpreter for Triton.
ALONE = {key: value for key, value in os.environ.items() if key not in ("PYTEST_XDIST_WORKER", "TRITON_INTERPRET")}


def benchmark(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=ALONE, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def collected() -> list[str]:
    done = benchmark("benchmarks", "--collect-only")
    assert done.returncode == 0, done.stdout
    return re.findall(r"^benchmarks/(\S+)$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("family", ["attention", "gemm", "quantize", "rotary"])
def test_every_rival_of_a_registry_has_its_benchmarks(collected: list[str], family: str) -> None:
    mine = [name for name in collected if name.startswith(f"bench_{family}.py::bench_{family}[")]
    backends = {re.split(r"[-\]]", name.partition("[")[2])[0] for name in mine}
    assert backends == set(plugins.names(f"te_bench.kernels.{family}.backends"))


def test_attention_is_timed_at_two_shapes_both_ways(collected: list[str]) -> None:
    mine = [name for name in collected if "[flash-" in name]
    assert len(mine) == 4


def test_benchmarks_are_no_part_of_make_test() -> None:
    recipe = (ROOT / "Makefile").read_text()
    assert "pytest benchmarks" in recipe.partition("\nbench:")[2].partition("\n\n")[0]
    assert "benchmarks" not in recipe.partition("\ntest:")[2].partition("\n\n")[0]
    assert 'testpaths = ["tests"]' in (ROOT / "pyproject.toml").read_text()


def test_one_of_them_runs_and_its_file_imports(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    chosen = "benchmarks/bench_quantize.py::bench_quantize[reference-row]"
    done = benchmark(chosen, "--device", "cpu", "--benchmark-max-time=0.01", "--benchmark-json", file)
    assert done.returncode == 0, done.stdout
    (found,) = json.loads(file.read_text())["benchmarks"]
    assert found["group"] == "quantize per row"
    assert found["extra_info"] == found["extra_info"] | {
        "device": "cpu",
        "gpu": None,
        "dtype": "fp32",
        "m": 128,
        "n": 256,
    }
    assert found["stats"]["rounds"] >= 5
    environment, _, (record,) = pytest_import.journal(pytest_import.read(file), file.name)
    assert record.samples["latency_s"] == found["stats"]["data"]
    assert environment["identity"]["torch"] == found["extra_info"]["torch"]


#: benchmarks/conftest.py with a GPU whose events say 1, 2 and 3 ms.
PRETENDED = """
import importlib.util
import sys

import pytest

spec = importlib.util.spec_from_file_location("suites", {path!r})
suites = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suites)
suites.device_of = lambda config: "cuda"
calls = []


def kernel(call, device):
    assert device == "cuda"
    calls.append(call())
    return [0.001, 0.002, 0.003]


suites.timing.kernel = kernel
pytest_addoption = suites.pytest_addoption
pytest_collection_modifyitems = suites.pytest_collection_modifyitems
cuda_benchmark = suites.cuda_benchmark


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture
def machine():
    return {{"gpu": "NVIDIA H200"}}
"""
SUITE = """
import pytest

times = []


@pytest.mark.parametrize("name", ["a", "b"])
def test_it(cuda_benchmark, name):
    times.clear()
    cuda_benchmark(lambda: times.append(name), group="events", rows=4)
    assert times == [name]  # by whoever reads the events, and by nobody else
"""
TWICE = "import pytest, sys; sys.exit(any(pytest.main(['-q', 'test_it.py', *how.split()]) for how in sys.argv[1:]))"


def test_on_a_gpu_the_rounds_are_what_the_events_measured_and_the_call_runs_once_where_disabled(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PRETENDED.format(path=str(ROOT / "benchmarks" / "conftest.py")))
    (tmp_path / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-c", TWICE, "--benchmark-json out.json", "--benchmark-disable"]
    done = subprocess.run(command, cwd=tmp_path, env=ALONE, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.count("2 passed")) == (0, 2), done.stdout
    found: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert [one["name"] for one in found] == ["test_it[a]", "test_it[b]"]
    for one in found:
        assert one["stats"]["data"] == [0.001, 0.002, 0.003]
        assert one["options"]["timer"] == "torch.cuda.Event"
        assert (one["group"], one["extra_info"]) == ("events", {"gpu": "NVIDIA H200", "rows": 4})
