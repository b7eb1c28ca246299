"""te-bench as a fixture. Tests of the command line simulate convergence runs as those of the reports do."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gates import QUICK
from in_process import Command, Started
from revisions import Repository

from te_bench.experiments import runner
from te_bench.experiments.spec import Trial
from te_bench.experiments.store import Store
from te_bench.gate import paired_trial, revisions


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """What trials were to be run by: each run ends, as by Ctrl-C, before its first one."""
    found: list[Started] = []

    def run(trials: Sequence[Trial], store: Store, environment_id: str, **options: Any) -> None:
        found.append(Started(trials, dict(store.journal.environments[environment_id]), options))
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", run)
    return found


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


@pytest.fixture
def temporary(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of commands, which run inside the repository."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.chdir(repository.root)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def gate(command: Command, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """gate("--head", ...) from inside the repository, in rounds of a tenth of a second."""
    for name, value in QUICK.items():
        monkeypatch.setattr(paired_trial, name, value)
    monkeypatch.setattr(revisions, "LOOKS", (5,))
    out = tmp_path / "out"

    def run(base: str, *arguments: object, margin: str = "100%") -> Any:
        done = command("gate", "--base", base, "--device", "cpu", "--out", out, "--margin", margin, *arguments)
        assert not list(temporary.iterdir())
        return done

    return run
