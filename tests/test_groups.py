"""What `make test` counts on: one worker runs a group's tests, a function's, and those that share a
module's fixture, which is made once."""

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
SHARED = """
import os, pathlib, pytest

@pytest.fixture(scope="module", params=["v", "w"])
def shared(request):
    with pathlib.Path("made").open("a") as made:
        made.write(request.param)
    return request.param

def test_first(shared):
    pass

def test_alone():
    pass

@pytest.mark.slow
def test_second(shared):
    pass

@pytest.mark.parametrize("name", ["x", "y"])
def test_third(shared, name):
    pass
"""
TOGETHER = (("a", "b, c", "d", "e"), ("1", "2@3", "4", "5"))


def test_a_group_stays_with_one_worker_and_a_fixture_of_a_module_is_made_once(tmp_path: Path) -> None:
    """Whatever other modules' tests are dealt, and though the slow ones come first."""
    for name, text in {"test_grouped": TESTS, "test_shared": SHARED}.items():
        (tmp_path / f"{name}.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), environment["PYTHONPATH"]))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    subprocess.run([*command, "-p", "conftest"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    for names in TOGETHER:
        workers = [(tmp_path / name).read_text() for name in names]
        assert len(set(workers)) == 1, f"pytest-xdist takes groups apart: {workers}"
    assert sorted((tmp_path / "made").read_text()) == ["v", "w"]
