"""What every test may use; its being here also puts this folder on the import path."""

import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # one worker a core already
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """Environment variables under which `import torch` says that there is no such package."""
    folder = tmp_path / "no_torch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text('import sys\n\nsys.modules["torch"] = None\n')
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
