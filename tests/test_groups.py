"""What `make test` counts on: one worker runs a group's tests, so that what they share is made once."""

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
"""


def test_a_group_stays_with_one_worker(tmp_path: Path) -> None:
    (tmp_path / "test_grouped.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    workers = [(tmp_path / name).read_text() for name in ("a", "b, c", "d", "e")]
    assert len(set(workers)) == 1, f"pytest-xdist takes groups apart: {workers}"
