"""Every example runs."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs_and_learns(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = runpy.run_path(str(path))["main"]()
    assert loss < 4.5  # ln 256 = 5.5 is knowing nothing
    assert "validation loss" in capsys.readouterr().out
