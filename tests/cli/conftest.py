"""te-bench as a fixture. Tests of the command line simulate convergence runs as those of the reports do."""

import sys
from pathlib import Path

import pytest
from in_process import Command

sys.path.append(str(Path(__file__).resolve().parents[1] / "reports"))  # journals.py and convergence.py


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)
