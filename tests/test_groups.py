"""What `make test` counts on: one worker runs a group's tests, or a function's, so that what they share is made once."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import os, pathlib, pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("name", ["a", "b, c", "d", "e"])
def test_worker(name):
    pathlib.Path(name).write_text(os.environ["PYTEST_XDIST_WORKER"])

@pytest.mark.parametrize("name", ["1", "2@3", "4", "5"])
def test_cells(name):
    pathlib.Path(name).write_text(os.environ["PYTEST_XDIST_WORKER"])
"""
TOGETHER = (("a", "b, c", "d", "e"), ("1", "2@3", "4", "5"))


def test_a_group_stays_with_one_worker_and_so_do_a_functions_parametrisations(tmp_path: Path) -> None:
    (tmp_path / "test_grouped.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), environment["PYTHONPATH"]))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    subprocess.run([*command, "-p", "conftest"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    for names in TOGETHER:
        workers = [(tmp_path / name).read_text() for name in names]
        assert len(set(workers)) == 1, f"pytest-xdist takes groups apart: {workers}"
